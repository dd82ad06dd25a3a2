from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from recording_engine import MANIFEST, NEW, OLD, RecordingEngine

from agentrl.inference.fleet import EngineState, Fleet
from agentrl.inference.router import EngineRouter
from agentrl.testing.clock import run_virtual
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import Boundary, EngineError, EpisodeError, PublishError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.types.weights import PauseMode
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher

LONG_S, SHORT_S = 20.0, 0.05
SWAPPED = ["pause", "swap", "receipt", "resume"]


class BusyEngine(RecordingEngine):
    """Replies with two tokens once told to; a pause gives back what has none, with one token, until it is resumed.

    `others` is what it says of its requests beside ours; None where it says nothing at all.
    """

    def __init__(self, name: str, failing: str | None = None) -> None:
        super().__init__(name, failing)
        self.running: dict[str, asyncio.Future[tuple[FinishReason, PolicyVersion]]] = {}
        self.requests: list[GenerationRequest] = []
        self.others: list[int | EngineError | None] = [0]
        self.flows = asyncio.Event()
        self.flows.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await self.flows.wait()
        self.running[request.session] = asyncio.get_running_loop().create_future()
        finish, version = await self.running[request.session]
        num_tokens = 1 if finish is FinishReason.ABORT else 2
        spans = (VersionSpan(version, 0, num_tokens),)
        logprobs = np.zeros(num_tokens, np.float32)
        return Generation(np.zeros(num_tokens, np.int32), logprobs, spans, spans, finish)

    def finish(self, session: str, how: FinishReason = FinishReason.STOP) -> None:
        reply = self.running.pop(session)
        if not reply.done():
            reply.set_result((how, self.version))

    async def pause(self) -> int:
        self.flows.clear()
        for session in list(self.running):
            self.finish(session, FinishReason.ABORT)
        return await super().pause()

    async def resume(self) -> None:
        await super().resume()
        self.flows.set()

    async def count_requests(self) -> int | None:
        said = self.others.pop(0) if len(self.others) > 1 else self.others[0]
        if isinstance(said, EngineError):
            raise said
        return said


class Bench:
    """Engines behind a router, and a publisher that lets them drain."""

    def __init__(self, *engines: BusyEngine, drain_s: float = LONG_S, wait_s: float = LONG_S) -> None:
        self.fleet = Fleet(engines, OLD)  # type: ignore[arg-type]
        self.router = EngineRouter(self.fleet, wait_s)
        config = PublishConfig(pause_mode=PauseMode.DRAIN, drain_s=drain_s, patience_s=LONG_S)
        self.publisher = StagedPublisher(self.fleet, DiskTransport(), config, WeightsManifest("main", OLD, "/m", {}, 0))

    def ask(self, session: str) -> asyncio.Task[Generation]:
        prompt = np.frombuffer(session.encode(), np.uint8).astype(np.int32)
        request = GenerationRequest(f"rid-{session}", session, prompt, 9, (), Sampling(), 0)
        return asyncio.create_task(self.router.generate(request))

    async def publish(self) -> asyncio.Task[list]:
        """A publication that has begun to drain."""
        task = asyncio.create_task(self.publisher.publish(MANIFEST))
        await turns()
        return task

    def counted(self) -> tuple[float, float]:
        metrics = self.publisher.metrics()
        return metrics["publish/drained_requests_total"], metrics["publish/cut_requests_total"]


async def turns() -> None:
    """Let everything that need not wait go on."""
    for _ in range(20):
        await asyncio.sleep(0)


def versions(generation: Generation) -> list:
    return [span.version for span in generation.versions]


async def test_an_engine_is_paused_once_its_requests_have_ended_and_none_is_cut() -> None:
    engine = BusyEngine("x")
    bench = Bench(engine)
    first, second = bench.ask("first"), bench.ask("second")
    await turns()
    publishing = await bench.publish()
    engine.finish("first")
    await turns()
    assert engine.calls == []
    engine.finish("second")
    await publishing
    assert engine.calls == SWAPPED
    for reply in (await first, await second):
        assert (reply.finish, versions(reply)) == (FinishReason.STOP, [OLD])
    assert bench.counted() == (2.0, 0.0)
    assert bench.router.interrupted == 0
    assert bench.publisher.metrics()["publish/drain_s_total"] > 0


def test_what_still_runs_at_the_deadline_is_cut_and_keeps_its_tokens() -> None:
    async def run() -> None:
        engine = BusyEngine("x")
        bench = Bench(engine, drain_s=SHORT_S)
        quick, slow = bench.ask("quick"), bench.ask("slow")
        await turns()
        publishing = await bench.publish()
        engine.finish("quick")
        await publishing
        assert (await quick).finish is FinishReason.STOP
        part = await slow
        assert (part.finish, versions(part), len(part.token_ids)) == (FinishReason.ABORT, [OLD], 1)
        assert bench.counted() == (1.0, 1.0)
        assert bench.router.interrupted == 1
        rest = bench.ask("slow")
        await turns()
        engine.finish("slow")
        assert versions(await rest) == [NEW]

    run_virtual(run())


async def test_no_request_is_sent_to_an_engine_that_drains_and_a_lone_engines_wait_for_its_new_weights() -> None:
    engine = BusyEngine("x")
    bench = Bench(engine)
    before = bench.ask("before")
    await turns()
    publishing = await bench.publish()
    after = bench.ask("after")
    await turns()
    assert [request.session for request in engine.requests] == ["before"]
    engine.finish("before")
    await before
    await publishing
    await turns()
    assert [request.session for request in engine.requests] == ["before", "after"]
    engine.finish("after")
    assert versions(await after) == [NEW]


async def test_requests_go_to_an_engine_that_does_not_drain() -> None:
    draining, other = BusyEngine("a"), BusyEngine("b")
    bench = Bench(draining, other)
    running = bench.ask("mine")
    await turns()
    with bench.fleet.held("a"):
        assert bench.fleet.open == ["b"]
        assert bench.fleet.healthy == ["a", "b"]
        more = [bench.ask("more"), bench.ask("still more")]
        await turns()
    assert [[r.session for r in engine.requests] for engine in (draining, other)] == [["mine"], ["more", "still more"]]
    for engine in (draining, other):
        for session in list(engine.running):
            engine.finish(session)
    await asyncio.gather(running, *more)


def test_without_the_hold_an_engine_that_is_asked_again_and_again_never_drains() -> None:
    async def run() -> None:
        engine = BusyEngine("x")
        bench = Bench(engine, drain_s=SHORT_S)
        requests = [bench.ask("0")]
        await turns()
        publishing = await bench.publish()
        bench.fleet.members["x"].is_held = False
        for number in range(1, 5):
            requests.append(bench.ask(str(number)))
            await turns()
            engine.finish(str(number - 1))
            await turns()
        assert engine.calls == []
        await publishing
        assert bench.counted()[1] == 1.0
        await asyncio.gather(*requests)

    run_virtual(run())


async def test_all_engines_drain_at_once_and_each_goes_on_by_itself() -> None:
    slow, quick = BusyEngine("a"), BusyEngine("b")
    bench = Bench(slow, quick)
    replies = [bench.ask("one"), bench.ask("two")]
    await turns()
    publishing = await bench.publish()
    assert bench.fleet.open == []
    late = bench.ask("late")
    quick.finish("two")
    await turns()
    assert (quick.calls, slow.calls) == (SWAPPED, [])
    await turns()
    assert [request.session for request in quick.requests] == ["two", "late"]
    slow.finish("one")
    quick.finish("late")
    assert len(await publishing) == 2
    assert versions(await late) == [NEW]
    await asyncio.gather(*replies)


async def test_requests_of_others_are_waited_for_where_the_server_tells_of_them() -> None:
    engine = BusyEngine("x")
    engine.others = [3, EngineError("no answer"), 1, 0]
    bench = Bench(engine)
    await bench.publisher.publish(MANIFEST)
    assert engine.others == [0]
    assert engine.calls == SWAPPED
    assert bench.counted() == (0.0, 0.0)


async def test_others_who_go_on_asking_hold_the_weights_back_no_longer_than_the_deadline() -> None:
    engine = BusyEngine("x")
    engine.others = [7]
    bench = Bench(engine, drain_s=SHORT_S)
    await bench.publisher.publish(MANIFEST)
    assert engine.calls == SWAPPED
    assert SHORT_S <= bench.publisher.metrics()["publish/drain_s_total"] < LONG_S


async def test_of_a_server_that_does_not_say_what_it_has_only_our_requests_count() -> None:
    engine = BusyEngine("x")
    engine.others = [None]
    bench = Bench(engine)
    mine = bench.ask("mine")
    await turns()
    publishing = await bench.publish()
    assert engine.calls == []
    engine.finish("mine")
    await asyncio.gather(mine, publishing)
    assert bench.counted() == (1.0, 0.0)


async def test_a_request_that_an_engine_drops_while_it_drains_is_sent_again_after_the_swap() -> None:
    engine = BusyEngine("x")
    bench = Bench(engine)
    mine = bench.ask("mine")
    await turns()
    publishing = await bench.publish()
    engine.running.pop("mine").set_exception(EpisodeError(Boundary.ENGINE, "unreachable", "dropped"))
    await publishing
    async with asyncio.timeout(LONG_S):
        while "mine" not in engine.running:
            await asyncio.sleep(0.01)
    assert len(engine.requests) == 2
    engine.finish("mine")
    assert versions(await mine) == [NEW]


async def test_a_reply_that_waits_for_a_proof_does_not_hold_the_next_drain_up() -> None:
    engine = BusyEngine("x")
    bench = Bench(engine)
    mine = bench.ask("mine")
    await turns()
    member = bench.fleet.members["x"]
    bench.fleet.begin_proof("x", NEW)
    engine.version = NEW
    engine.finish("mine")
    await turns()
    assert not mine.done()
    assert member.num_requests == 0
    await member.wait_until_idle()
    bench.fleet.proven("x")
    assert versions(await mine) == [NEW]


async def test_an_engine_that_dies_while_it_drains_is_not_waited_for() -> None:
    engine, other = BusyEngine("a", "pause"), BusyEngine("b")
    engine.others = [EngineError("gone")]
    bench = Bench(engine, other)
    mine = bench.ask("mine")
    await turns()
    publishing = await bench.publish()
    bench.fleet.dead("a", "killed")
    async with asyncio.timeout(LONG_S / 2):
        assert [receipt.engine for receipt in await publishing] == ["b"]
    await turns()
    other.finish("mine")
    assert versions(await mine) == [NEW]
    assert bench.fleet.members["a"].state is EngineState.DEAD


@pytest.mark.parametrize("phase", ["pause", "swap", "receipt", "resume"])
async def test_an_engine_that_fails_after_it_drained_is_not_held_any_more(phase: str) -> None:
    engine = BusyEngine("x", phase)
    bench = Bench(engine)
    with pytest.raises(PublishError):
        await bench.publisher.publish(MANIFEST)
    assert not bench.fleet.members["x"].is_held
    engine.failing = None
    await bench.publisher.sync("x")
    mine = bench.ask("mine")
    await turns()
    engine.finish("mine")
    assert versions(await mine) == [NEW]


async def test_a_publisher_that_is_closed_lets_a_draining_engine_go_on() -> None:
    engine = BusyEngine("x")
    bench = Bench(engine)
    first = bench.ask("first")
    await turns()
    publishing = await bench.publish()
    second = bench.ask("second")
    publishing.cancel()
    await bench.publisher.close()
    await turns()
    assert engine.calls == []
    engine.finish("first")
    engine.finish("second")
    assert versions(await first) == versions(await second) == [OLD]


async def test_a_request_waits_for_a_held_engine_no_longer_than_it_may() -> None:
    bench = Bench(BusyEngine("x"), wait_s=SHORT_S)
    with bench.fleet.held("x"), pytest.raises(EpisodeError, match="x: is held back for its weights"):
        await bench.ask("mine")


async def test_weights_that_have_only_a_new_name_are_not_drained_for() -> None:
    engine = BusyEngine("x")
    bench = Bench(engine)
    await bench.publisher.publish(MANIFEST)
    running = bench.ask("mine")
    await turns()
    renamed = dataclasses.replace(MANIFEST, version=NEW.next(), unchanged_since=NEW)
    await bench.publisher.publish(renamed)
    assert not running.done()
    engine.finish("mine")
    assert versions(await running) == [NEW.next()]
    assert bench.counted() == (0.0, 0.0)
