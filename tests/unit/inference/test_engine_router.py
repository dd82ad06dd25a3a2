from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import numpy as np
import pytest

from agentrl.inference.attempts import Cause
from agentrl.inference.fleet import EngineState, Fleet
from agentrl.inference.router import EngineRouter
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan

FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)


class GatedEngine:
    """Answers once its gate is open; `failure` is raised instead, if set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sessions: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: EpisodeError | None = None
        self.writes = [FIRST]
        self.repeated_calls: Counter[str] = Counter()

    async def generate(self, request: GenerationRequest) -> Generation:
        self.sessions.append(request.session)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        spans = tuple(VersionSpan(version, n, n + 1) for n, version in enumerate(self.writes))
        size = len(self.writes)
        return Generation(np.zeros(size, np.int32), np.zeros(size, np.float32), spans, spans, FinishReason.STOP)


UNREACHABLE = EpisodeError(Boundary.ENGINE, "unreachable", "gone")


@pytest.fixture
async def fleet() -> tuple[EngineRouter, list[GatedEngine]]:
    engines = [GatedEngine(name) for name in "abc"]
    return EngineRouter(Fleet(engines, FIRST)), engines  # type: ignore[arg-type]


Parts = tuple[EngineRouter, list[GatedEngine]]


def _request(session: str) -> GenerationRequest:
    """With a prompt of its own, so that only the session decides."""
    prompt = np.frombuffer(session.encode(), np.uint8).astype(np.int32)
    return GenerationRequest("rid", session, prompt, 1, (), Sampling(), 0)


async def test_sessions_begin_on_the_least_loaded_engine(fleet: Parts) -> None:
    router, engines = fleet
    for engine in engines:
        engine.gate.clear()
    tasks = [asyncio.create_task(router.generate(_request(f"s{n}"))) for n in range(9)]
    await asyncio.sleep(0.01)
    assert [len(engine.sessions) for engine in engines] == [3, 3, 3]
    engines[1].gate.set()
    await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(router.generate(_request("late")))]
    await asyncio.sleep(0.01)
    assert engines[1].sessions[-1] == "late"
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*tasks)


async def test_a_session_stays_on_its_engine_until_it_ends(fleet: Parts) -> None:
    router, engines = fleet
    engines[0].gate.clear()
    blocker = asyncio.create_task(router.generate(_request("blocker")))
    await asyncio.sleep(0)
    await router.generate(_request("mine"))
    engines[0].gate.set()
    await blocker
    await router.generate(_request("mine"))
    assert engines[1].sessions == ["mine", "mine"]
    router.end_session("mine")
    router.end_session("mine")
    await router.generate(dataclasses.replace(_request("another prompt"), session="mine"))
    assert engines[0].sessions == ["blocker", "mine"]


async def test_nothing_is_counted_as_drawn_again_where_nothing_was_lost(fleet: Parts) -> None:
    router, _ = fleet
    assert (await router.generate(_request("mine"))).regenerated_tokens == 0


async def test_an_engine_set_aside_serves_nobody_until_it_is_put_back(fleet: Parts) -> None:
    router, engines = fleet
    await router.generate(_request("mine"))
    router.fleet.set_aside("a", "stale")
    router.fleet.set_aside("a", "still stale")
    assert router.fleet.aside == {"a": "still stale"}
    assert router.fleet.healthy == ["b", "c"]
    await router.generate(_request("mine"))
    assert engines[1].sessions == ["mine"]
    router.fleet.proven("a")
    router.fleet.proven("a")
    assert router.fleet.healthy == ["a", "b", "c"]
    await router.generate(_request("mine"))
    assert engines[1].sessions == ["mine", "mine"]


async def test_sessions_wait_for_their_engine_while_it_is_held_and_new_ones_go_elsewhere(fleet: Parts) -> None:
    engines = fleet[1]
    router = EngineRouter(fleet[0].fleet, 60.0)
    await router.generate(_request("mine"))
    with router.fleet.held("a"), router.fleet.held("b"):
        waiting = asyncio.create_task(router.generate(_request("mine")))
        for session in ("new", "newer"):
            await router.generate(_request(session))
        assert not waiting.done()
    await waiting
    assert [engine.sessions for engine in engines] == [["mine", "mine"], [], ["new", "newer"]]
    for session in ("new", "newer"):
        await router.generate(_request(session))
    assert engines[0].sessions == ["mine", "mine", "new", "newer"], "none of them stayed where it had to go"


async def test_a_session_whose_held_engine_is_set_aside_goes_elsewhere(fleet: Parts) -> None:
    engines = fleet[1]
    router = EngineRouter(fleet[0].fleet, 60.0)
    await router.generate(_request("mine"))
    with router.fleet.held("a"):
        waiting = asyncio.create_task(router.generate(_request("mine")))
        await asyncio.sleep(0)
        router.fleet.set_aside("a", "stale")
        await waiting
    assert engines[1].sessions == ["mine"]


async def test_a_request_that_was_dropped_goes_to_each_other_engine_once_and_is_counted(fleet: Parts) -> None:
    router, engines = fleet
    engines[0].failure = engines[1].failure = UNREACHABLE
    engines[2].writes = [FIRST] * 5
    assert (await router.generate(_request("mine"))).regenerated_tokens == 2 * 5
    assert [len(engine.sessions) for engine in engines] == [1, 1, 1]
    assert router.regenerated == 2
    engines[2].failure = UNREACHABLE
    with pytest.raises(EpisodeError, match="gone"):
        await router.generate(_request("mine"))
    assert [len(engine.sessions) for engine in engines] == [2, 2, 2]
    assert router.regenerated == 4


@pytest.mark.parametrize("kind", ["refused", "engine.generate", "engine.answer"])
async def test_a_request_that_was_answered_is_not_sent_again(fleet: Parts, kind: str) -> None:
    router, engines = fleet
    engines[0].failure = EpisodeError(Boundary.ENGINE, kind, "no")
    with pytest.raises(EpisodeError, match="no"):
        await router.generate(_request("mine"))
    assert router.regenerated == 0
    assert engines[1].sessions == []


async def test_a_request_dropped_by_an_engine_that_was_set_aside_meanwhile_is_sent_again(fleet: Parts) -> None:
    router, engines = fleet
    engines[0].gate.clear()
    engines[0].failure = UNREACHABLE
    task = asyncio.create_task(router.generate(_request("mine")))
    await asyncio.sleep(0)
    router.fleet.set_aside("a", "killed")
    router.fleet.set_aside("c", "stale")
    engines[0].gate.set()
    await task
    assert engines[1].sessions == ["mine"]


async def test_with_no_engine_left_the_failure_says_why_of_each(fleet: Parts) -> None:
    router, _ = fleet
    for name in "abc":
        router.fleet.set_aside(name, f"reason of {name}")
    with pytest.raises(EpisodeError, match="a: reason of a; b: reason of b; c: reason of c") as caught:
        await router.generate(_request("mine"))
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.ENGINE, "none_healthy")
    with pytest.raises(EpisodeError, match="none was started"):
        await EngineRouter(Fleet([], FIRST)).generate(_request("mine"))


async def test_a_cancelled_request_no_longer_counts_as_load(fleet: Parts) -> None:
    router, engines = fleet
    engines[0].gate.clear()
    task = asyncio.create_task(router.generate(_request("first")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engines[0].gate.set()
    await router.generate(_request("second"))
    assert engines[0].sessions == ["first", "second"]


async def test_sessions_with_one_prompt_share_an_engine_while_its_load_allows(fleet: Parts) -> None:
    router, engines = fleet
    for engine in engines:
        engine.gate.clear()
    same = [dataclasses.replace(_request("prompt"), session=f"s{n}") for n in range(7)]
    tasks = [asyncio.create_task(router.generate(request)) for request in same]
    await asyncio.sleep(0.01)
    assert len(engines[0].sessions) == 3, "two more than the others are worth the shared prompt, not three"
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*tasks)


async def test_a_reply_under_a_version_that_nobody_has_proven_is_not_committed(fleet: Parts) -> None:
    router, engines = fleet
    engines[0].writes = [SECOND] * 3
    generation = await router.generate(_request("mine"))
    assert {span.version for span in generation.versions} == {FIRST}
    assert generation.regenerated_tokens == 3
    assert engines[1].sessions == ["mine"]
    assert (router.resent, router.regenerated) == ({Cause.FENCED: 1}, 1)
    assert router.fleet.metrics()["engines/distrusted_total"] == 1.0
    assert router.fleet.members["a"].state is EngineState.STALE
    assert "a wrote under version 0.1, but is proven to hold 0.0" in router.fleet.aside["a"]


async def test_a_reply_under_a_version_that_the_engine_no_longer_holds_is_not_committed(fleet: Parts) -> None:
    router, engines = fleet
    router.fleet.begin_proof("a", SECOND)
    router.fleet.proven("a")
    await router.generate(_request("mine"))
    assert router.resent == {Cause.FENCED: 1}
    assert (engines[0].sessions, engines[1].sessions) == (["mine"], ["mine"])


@pytest.mark.parametrize("is_right", [True, False])
async def test_a_reply_under_proof_waits_for_the_verdict(fleet: Parts, is_right: bool) -> None:
    router, engines = fleet
    engines[0].gate.clear()
    task = asyncio.create_task(router.generate(_request("mine")))
    await asyncio.sleep(0)
    router.fleet.begin_proof("a", SECOND)
    engines[0].writes = [FIRST, SECOND]
    engines[0].gate.set()
    await asyncio.sleep(0.01)
    assert not task.done()
    if is_right:
        router.fleet.proven("a")
    else:
        router.fleet.disproven("a", "wrong weights")
    versions = [span.version for span in (await task).versions]
    assert versions == ([FIRST, SECOND] if is_right else [FIRST])
    assert router.resent == ({} if is_right else {Cause.FENCED: 1})


async def test_requests_of_an_engine_that_dies_go_elsewhere_at_once(fleet: Parts) -> None:
    router, engines = fleet
    engines[0].gate.clear()
    task = asyncio.create_task(router.generate(_request("mine")))
    await asyncio.sleep(0.01)
    router.fleet.dead("a", "killed")
    async with asyncio.timeout(20):
        await task
    assert engines[1].sessions == ["mine"]
    assert router.regenerated == 1


async def test_a_request_waits_for_an_engine_to_come_back_and_no_longer_than_it_may(fleet: Parts) -> None:
    _, engines = fleet
    router = EngineRouter(Fleet(engines[:1], FIRST), wait_s=20.0)  # type: ignore[arg-type]
    router.fleet.dead("a", "killed")
    task = asyncio.create_task(router.generate(_request("mine")))
    await asyncio.sleep(0.01)
    assert not task.done()
    router.fleet.restarted("a", engines[1])  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert not task.done(), "it has no receipt yet"
    router.fleet.proven("a")
    await task
    impatient = EngineRouter(router.fleet, wait_s=0.02)
    router.fleet.dead("a", "killed again")
    with pytest.raises(EpisodeError, match="a: killed again"):
        await impatient.generate(_request("mine"))
