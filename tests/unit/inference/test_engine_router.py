from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentrl.inference.router import EngineRouter
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling


class GatedEngine:
    """Answers once its gate is open; `failure` is raised instead, if set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sessions: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: EpisodeError | None = None

    async def generate(self, request: GenerationRequest) -> Generation:
        self.sessions.append(request.session)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return Generation(np.zeros(1, np.int32), np.zeros(1, np.float32), (), (), FinishReason.STOP)


UNREACHABLE = EpisodeError(Boundary.ENGINE, "unreachable", "gone")


@pytest.fixture
async def fleet() -> tuple[EngineRouter, list[GatedEngine]]:
    engines = [GatedEngine(name) for name in "abc"]
    return EngineRouter(engines), engines  # type: ignore[arg-type]


Fleet = tuple[EngineRouter, list[GatedEngine]]


def _request(session: str) -> GenerationRequest:
    return GenerationRequest("rid", session, np.zeros(1, np.int32), 1, (), Sampling(), 0)


async def test_sessions_begin_on_the_least_loaded_engine(fleet: Fleet) -> None:
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


async def test_a_session_stays_on_its_engine_until_it_ends(fleet: Fleet) -> None:
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
    await router.generate(_request("mine"))
    assert engines[0].sessions == ["blocker", "mine"]


async def test_an_engine_set_aside_serves_nobody_until_it_is_put_back(fleet: Fleet) -> None:
    router, engines = fleet
    await router.generate(_request("mine"))
    router.set_aside("a", "stale")
    router.set_aside("a", "still stale")
    assert router.aside == {"a": "still stale"}
    assert router.healthy == ["b", "c"]
    await router.generate(_request("mine"))
    assert engines[1].sessions == ["mine"]
    router.put_back("a")
    router.put_back("a")
    assert router.healthy == ["a", "b", "c"]
    await router.generate(_request("mine"))
    assert engines[1].sessions == ["mine", "mine"]


async def test_a_request_that_was_dropped_goes_to_each_other_engine_once_and_is_counted(fleet: Fleet) -> None:
    router, engines = fleet
    engines[0].failure = engines[1].failure = UNREACHABLE
    await router.generate(_request("mine"))
    assert [len(engine.sessions) for engine in engines] == [1, 1, 1]
    assert router.regenerated == 2
    engines[2].failure = UNREACHABLE
    with pytest.raises(EpisodeError, match="gone"):
        await router.generate(_request("mine"))
    assert [len(engine.sessions) for engine in engines] == [2, 2, 2]
    assert router.regenerated == 4


@pytest.mark.parametrize("kind", ["refused", "engine.generate", "engine.answer"])
async def test_a_request_that_was_answered_is_not_sent_again(fleet: Fleet, kind: str) -> None:
    router, engines = fleet
    engines[0].failure = EpisodeError(Boundary.ENGINE, kind, "no")
    with pytest.raises(EpisodeError, match="no"):
        await router.generate(_request("mine"))
    assert router.regenerated == 0
    assert engines[1].sessions == []


async def test_a_request_dropped_by_an_engine_that_was_set_aside_meanwhile_is_sent_again(fleet: Fleet) -> None:
    router, engines = fleet
    engines[0].gate.clear()
    engines[0].failure = UNREACHABLE
    task = asyncio.create_task(router.generate(_request("mine")))
    await asyncio.sleep(0)
    router.set_aside("a", "killed")
    router.set_aside("c", "stale")
    engines[0].gate.set()
    await task
    assert engines[1].sessions == ["mine"]


async def test_with_no_engine_left_the_failure_says_why_of_each(fleet: Fleet) -> None:
    router, _ = fleet
    for name in "abc":
        router.set_aside(name, f"reason of {name}")
    with pytest.raises(EpisodeError, match="a: reason of a; b: reason of b; c: reason of c") as caught:
        await router.generate(_request("mine"))
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.ENGINE, "none_healthy")
    with pytest.raises(EpisodeError, match="none was started"):
        await EngineRouter([]).generate(_request("mine"))


async def test_a_cancelled_request_no_longer_counts_as_load(fleet: Fleet) -> None:
    router, engines = fleet
    engines[0].gate.clear()
    task = asyncio.create_task(router.generate(_request("first")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engines[0].gate.set()
    await router.generate(_request("second"))
    assert engines[0].sessions == ["first", "second"]
