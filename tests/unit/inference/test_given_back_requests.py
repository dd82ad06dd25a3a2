"""A run that stops has its requests given back: its own, by their ids, and without waiting for what never answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.types.errors import Boundary, EngineError, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan

FIRST = PolicyVersion(0, 0)
LONG_S = 300.0


class HoldingEngine:
    """Generates until it is told to give a request back, by its id; `deaf` to so many tellings, or for ever."""

    def __init__(self, name: str, deaf: float = 0) -> None:
        self.name, self.deaf = name, deaf
        self.repeated_calls: Counter[str] = Counter()
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.asked = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        given_back = self.running[request.rid] = asyncio.Event()
        self.asked.set()
        await given_back.wait()
        spans = (VersionSpan(FIRST, 0, 2),)
        return Generation(np.asarray([7, 8], np.int32), np.zeros(2, np.float32), spans, spans, FinishReason.ABORT)

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        if self.deaf == float("inf"):
            await asyncio.Event().wait()
        if self.deaf:
            self.deaf -= 1
            raise EngineError("no answer")
        self.running[rid].set()


def request(rid: str) -> GenerationRequest:
    """With a prompt of its own, so that the engine with the least load gets it."""
    prompt = np.frombuffer(rid.encode(), np.uint8).astype(np.int32)
    return GenerationRequest(rid, f"session of {rid}", prompt, 9, (), Sampling(), 0)


def routing(*engines: HoldingEngine) -> EngineRouter:
    return EngineRouter(Fleet(engines, FIRST), wait_s=LONG_S)  # type: ignore[arg-type]


async def asking(router: EngineRouter, rids: Sequence[str]) -> list[asyncio.Task[Generation]]:
    tasks = [asyncio.create_task(router.generate(request(rid))) for rid in rids]
    await asyncio.sleep(0)
    for member in router.fleet.members.values():
        await member.engine.asked.wait()  # type: ignore[attr-defined]
    return tasks


def tokens(generation: Generation) -> tuple[list[int], FinishReason]:
    return generation.token_ids.tolist(), generation.finish


async def test_what_engines_have_drawn_comes_back_and_requests_of_others_go_on() -> None:
    engine = HoldingEngine("a")
    canary = asyncio.create_task(engine.generate(request("canary")))
    router = routing(engine)
    tasks = await asking(router, ["one", "two"])
    assert await router.give_back(LONG_S) == 0
    assert [tokens(await task) for task in tasks] == [([7, 8], FinishReason.ABORT)] * 2
    assert sorted(engine.aborted) == ["one", "two"]
    assert not canary.done()
    canary.cancel()


async def test_a_request_that_was_on_its_way_is_asked_for_again() -> None:
    engine = HoldingEngine("a", deaf=2)
    router = routing(engine)
    [task] = await asking(router, ["one"])
    assert await router.give_back(LONG_S) == 0
    assert tokens(await task) == ([7, 8], FinishReason.ABORT)
    assert engine.aborted == ["one"] * 3


async def test_a_request_that_waits_for_an_engine_ends_at_once_with_nothing() -> None:
    engine = HoldingEngine("a")
    router = routing(engine)
    router.fleet.dead("a", "gone")
    task = asyncio.create_task(router.generate(request("one")))
    await asyncio.sleep(0)
    assert await router.give_back(LONG_S) == 0
    assert tokens(await task) == ([], FinishReason.ABORT)
    assert engine.aborted == []


async def test_an_engine_that_never_answers_costs_what_it_has_drawn_and_no_more_time_than_is_given() -> None:
    hung, well = HoldingEngine("a", deaf=float("inf")), HoldingEngine("b")
    router = routing(hung, well)
    tasks = await asking(router, ["one", "two"])
    assert await router.give_back(0.2) == 1
    ended = [tokens(await task) for task in tasks]
    assert sorted(ended) == [([], FinishReason.ABORT), ([7, 8], FinishReason.ABORT)]


async def test_what_is_asked_for_later_gets_nothing() -> None:
    engine = HoldingEngine("a")
    router = routing(engine)
    await router.give_back(LONG_S)
    assert tokens(await router.generate(request("late"))) == ([], FinishReason.ABORT)
    assert not engine.running


async def test_whoever_cancels_a_request_is_not_told_that_it_was_given_back() -> None:
    router = routing(HoldingEngine("a"))
    [task] = await asking(router, ["one"])
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_an_engines_own_deadline_is_still_its_failure() -> None:
    class Slow(HoldingEngine):
        async def generate(self, request: GenerationRequest) -> Generation:
            raise EpisodeError(Boundary.TIMEOUT, "engine.generate", "no reply")

    [outcome] = await asyncio.gather(routing(Slow("a")).generate(request("one")), return_exceptions=True)
    assert isinstance(outcome, EpisodeError)
    assert outcome.failure.kind == "engine.generate"
