from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from agentrl.inference.attempts import Cause
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.testing.clock import run_virtual
from agentrl.types.errors import Boundary, EngineBusyError, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan

FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)
DROPPED = EpisodeError(Boundary.ENGINE, "unreachable", "connection reset")
FOREIGN = EpisodeError(Boundary.CONTRACT, "engine.identity", "its id is 'other'")
REQUEST = GenerationRequest("rid", "mine", np.arange(5, dtype=np.int32), 3, (), Sampling(), 0)


class FailingEngine:
    """Fails as often as its list is long, then answers; `asked` holds when and under which id."""

    def __init__(self, name: str, *failures: EpisodeError, always: EpisodeError | None = None) -> None:
        self.name = name
        self.asked: list[tuple[float, str]] = []
        self.writes = FIRST
        self.repeated_calls: Counter[str] = Counter()
        self._failures = list(failures)
        self._always = always

    @property
    def times(self) -> list[float]:
        return [round(at, 3) for at, _ in self.asked]

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append((asyncio.get_running_loop().time(), request.rid))
        if self._always is not None:
            raise self._always
        if self._failures:
            raise self._failures.pop(0)
        spans = (VersionSpan(self.writes, 0, 2),)
        return Generation(np.zeros(2, np.int32), np.zeros(2, np.float32), spans, spans, FinishReason.STOP)


def _router(*engines: FailingEngine, wait_s: float = 20.0) -> EngineRouter:
    return EngineRouter(Fleet(engines, FIRST), wait_s)  # type: ignore[arg-type]


def _play(work: Callable[[], Awaitable[None]]) -> None:
    run_virtual(work())  # type: ignore[arg-type]


def test_a_lone_engine_that_dropped_a_connection_is_asked_again_after_a_moment() -> None:
    async def play() -> None:
        engine = FailingEngine("a", DROPPED, DROPPED)
        router = _router(engine)
        generation = await router.generate(REQUEST)
        assert generation.regenerated_tokens == 2 * len(generation.token_ids)
        assert engine.times == [0.0, 0.1, 0.3]
        assert (router.resent, router.regenerated) == ({Cause.DROPPED: 2}, 2)

    _play(play)


def test_an_engine_that_drops_every_connection_is_given_up_when_the_time_is_over() -> None:
    async def play() -> None:
        engine = FailingEngine("a", always=DROPPED)
        router = _router(engine, wait_s=20.0)
        with pytest.raises(EpisodeError, match="connection reset"):
            await router.generate(REQUEST)
        assert asyncio.get_running_loop().time() == pytest.approx(20.0, abs=0.01)
        pauses = np.diff(engine.times).tolist()
        assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.01)

    _play(play)


def test_each_attempt_has_an_id_of_its_own_and_all_are_of_one_length() -> None:
    async def play() -> None:
        engine = FailingEngine("a", DROPPED, DROPPED, DROPPED)
        await _router(engine).generate(REQUEST)
        ids = [rid for _, rid in engine.asked]
        assert ids[0] == "rid"
        assert len(set(ids)) == 4
        assert {len(rid) for rid in ids[1:]} == {32}

    _play(play)


def test_engines_that_were_not_asked_come_before_one_that_failed() -> None:
    async def play() -> None:
        engines = [FailingEngine(name, DROPPED) for name in "abc"]
        await _router(*engines).generate(REQUEST)
        assert [engine.times for engine in engines] == [[0.0, 0.4], [0.0], [0.0]]

    _play(play)


def test_an_engine_that_has_proven_its_weights_since_counts_as_new_at_once() -> None:
    async def play() -> None:
        engine = FailingEngine("a")
        engine.writes = SECOND
        router = _router(engine)
        asking = asyncio.create_task(router.generate(REQUEST))
        await asyncio.sleep(7.0)
        assert engine.times == [0.0], "set aside by the fence"
        router.fleet.begin_proof("a", SECOND)
        router.fleet.proven("a")
        await asking
        assert engine.times == [0.0, 7.0]
        assert router.resent == {Cause.FENCED: 1}

    _play(play)


@pytest.mark.parametrize("is_attached", [True, False])
def test_an_engine_that_was_revived_counts_as_new_at_once(is_attached: bool) -> None:
    async def play() -> None:
        engine = FailingEngine("a", DROPPED)
        router = _router(engine)
        asking = asyncio.create_task(router.generate(REQUEST))
        await asyncio.sleep(0.05)
        router.fleet.dead("a", "killed")
        await asyncio.sleep(13.0)
        successor = engine if is_attached else FailingEngine("a")
        router.fleet.restarted("a", successor)  # type: ignore[arg-type]
        router.fleet.proven("a")
        await asking
        assert successor.times[-1] == 13.05

    _play(play)


def test_a_busy_engine_is_left_alone_for_as_long_as_it_asks_and_others_are_asked_first() -> None:
    async def play() -> None:
        busy, free = FailingEngine("a", EngineBusyError("full", 2.0)), FailingEngine("b")
        router = _router(busy, free)
        await router.generate(REQUEST)
        assert (busy.times, free.times) == ([0.0], [0.0])
        assert (router.resent, router.regenerated) == ({Cause.BUSY: 1}, 0)
        router.fleet.set_aside("b", "stale")
        await router.generate(REQUEST)
        assert busy.times == [0.0, 2.0]

    _play(play)


@pytest.mark.parametrize("retry_after_s", [0.0, 3.0])
def test_an_engine_that_is_always_busy_fails_the_request_when_the_time_is_over(retry_after_s: float) -> None:
    async def play() -> None:
        engine = FailingEngine("a", always=EngineBusyError("full", retry_after_s))
        with pytest.raises(EpisodeError, match="full") as caught:
            await _router(engine).generate(REQUEST)
        assert caught.value.failure.kind == "busy"
        assert asyncio.get_running_loop().time() == pytest.approx(20.0, abs=0.1)
        assert len(engine.asked) <= 20.0 / 0.05 + 1

    _play(play)


def test_an_answer_to_another_request_is_asked_for_again_elsewhere_and_named_if_it_repeats() -> None:
    async def play() -> None:
        wrong, right = FailingEngine("a", always=FOREIGN), FailingEngine("b")
        router = _router(wrong, right)
        await router.generate(REQUEST)
        assert (wrong.times, right.times, router.resent) == ([0.0], [0.0], {Cause.MISDELIVERED: 1})
        counted = router.metrics()
        assert (counted["requests/resent_misdelivered_total"], counted["requests/misdelivering_engines"]) == (1.0, 1.0)
        router.fleet.set_aside("b", "stale")
        with pytest.raises(EpisodeError, match="its id is 'other'") as caught:
            await router.generate(REQUEST)
        assert caught.value.failure.boundary is Boundary.CONTRACT
        assert len(wrong.asked) == 1 + 3

    _play(play)


def test_a_lone_engine_that_swapped_an_answer_once_gives_it_at_the_second_asking() -> None:
    async def play() -> None:
        router = _router(FailingEngine("a", FOREIGN))
        assert (await router.generate(REQUEST)).regenerated_tokens == 2

    _play(play)


def test_without_time_to_wait_each_engine_is_asked_once() -> None:
    async def play() -> None:
        engines = [FailingEngine("a", always=DROPPED), FailingEngine("b", always=DROPPED)]
        with pytest.raises(EpisodeError, match="connection reset"):
            await _router(*engines, wait_s=0.0).generate(REQUEST)
        assert [engine.times for engine in engines] == [[0.0], [0.0]]

    _play(play)
