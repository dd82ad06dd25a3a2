"""Publishing to any server under load: every transport, and a model spread over two processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_server import EngineCalls, Reference
from fleet_sessions import LOAD_S, PROMPT, check, make_manifest, make_transport, play, start_sessions
from running_request import ENDLESS_TOKENS

from agentrl.inference.config import ClientConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.protocols import WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher

pytestmark = pytest.mark.long

FIRST, SECOND, THIRD = (PolicyVersion(0, step) for step in range(3))
LONG_S, SHORT_S = 60.0, 0.02


async def _publish_twice(
    engine: EngineCalls, transport: WeightTransport, reference: Reference, mode: PauseMode = PauseMode.ABORT
) -> None:
    client = engine.server.client(mode, **ClientConfig(load_s=LOAD_S).model_dump())
    router = EngineRouter(Fleet([client], FIRST))
    first = make_manifest(engine.server.model, FIRST)
    publisher = StagedPublisher(router.fleet, transport, PublishConfig(), first)
    models = {FIRST: engine.server.model, SECOND: engine.server.other_model, THIRD: engine.server.model}
    seen: set[PolicyVersion] = set()
    for version in (SECOND, THIRD):
        sessions = await start_sessions(router, engine, name=f"session-{version.step}")
        (receipt,) = await publisher.publish(make_manifest(models[version], version))
        assert receipt.version == version
        for parts in await sessions.finish():
            seen |= check(parts, models, reference)
        after = await play(router, f"after-{version.step}", seed=1)
        assert check(after, models, reference) == {version}
    assert FIRST in seen
    assert len(seen) > 1
    assert router.fleet.aside == {}
    await publisher.close()
    await client.close()


@pytest.mark.parametrize("kind", ["disk", "broadcast", "tensors", "delta"])
async def test_a_session_goes_on_under_the_new_weights_by_every_transport(
    engine: EngineCalls, reference: Reference, tmp_path: Path, kind: str
) -> None:
    await _publish_twice(engine, make_transport(kind, tmp_path, 1), reference)


@pytest.mark.parametrize("kind", ["disk", "broadcast", "tensors"])
async def test_every_shard_takes_the_new_weights_by_every_transport(
    sharded_engine: EngineCalls, reference: Reference, tmp_path: Path, kind: str
) -> None:
    await _publish_twice(sharded_engine, make_transport(kind, tmp_path, 2), reference)


async def test_requests_that_are_retracted_go_on_under_the_new_weights(
    engine: EngineCalls, reference: Reference, tmp_path: Path
) -> None:
    await _publish_twice(engine, make_transport("disk", tmp_path), reference, PauseMode.RETRACT)


async def test_requests_frozen_in_place_go_on_in_one_reply_and_name_the_old_kv(
    engine: EngineCalls, reference: Reference
) -> None:
    client = engine.server.client(PauseMode.IN_PLACE, **ClientConfig(load_s=LOAD_S).model_dump())
    router = EngineRouter(Fleet([client], FIRST))
    first = make_manifest(engine.server.model, FIRST)
    publisher = StagedPublisher(router.fleet, DiskTransport(), PublishConfig(), first)
    sessions = await start_sessions(router, engine)
    await publisher.publish(make_manifest(engine.server.other_model, SECOND))
    replies = await sessions.finish()
    assert [len(parts) for parts in replies] == [1] * len(replies), "a frozen request needs no second call"
    switched = [part for (part,) in replies if {span.version for span in part.versions} == {FIRST, SECOND}]
    assert switched
    for part in switched:
        output, before = part.token_ids.tolist(), part.versions[0].end
        expected = reference.sampled(engine.server.model, PROMPT, output)[:before]
        assert part.logprobs[:before].tolist() == pytest.approx(expected, abs=1e-3)
        assert {span.version for span in part.kv_versions} == {FIRST}
    assert router.fleet.aside == {}
    await publisher.close()
    await client.close()


@dataclass(frozen=True)
class Draining:
    """An engine that is let finish before its swap."""

    router: EngineRouter
    publisher: StagedPublisher
    manifest: WeightsManifest

    def count(self, name: str) -> float:
        return self.publisher.metrics()[f"publish/{name}_total"]


@asynccontextmanager
async def _draining(engine: EngineCalls, drain_s: float) -> AsyncIterator[Draining]:
    client = engine.server.client(PauseMode.DRAIN, **ClientConfig(load_s=LOAD_S).model_dump())
    router = EngineRouter(Fleet([client], FIRST), wait_s=LONG_S)
    config = PublishConfig(pause_mode=PauseMode.DRAIN, drain_s=drain_s)
    first = make_manifest(engine.server.model, FIRST)
    publisher = StagedPublisher(router.fleet, DiskTransport(), config, first)
    yield Draining(router, publisher, make_manifest(engine.server.other_model, SECOND))
    assert router.fleet.aside == {}
    await publisher.close()
    await client.close()


async def test_an_engine_that_drains_cuts_no_reply_and_each_is_of_one_version(
    engine: EngineCalls, reference: Reference
) -> None:
    models = {FIRST: engine.server.model, SECOND: engine.server.other_model}
    async with _draining(engine, LONG_S) as draining:
        sessions = await start_sessions(draining.router, engine)
        await draining.publisher.publish(draining.manifest)
        replies = [*await sessions.finish(), await play(draining.router, "after", seed=1)]
        assert [len(parts) for parts in replies] == [1] * len(replies)
        assert [check(parts, models, reference) for parts in replies if len(parts[0].versions) != 1] == []
        assert set.union(*(check(parts, models, reference) for parts in replies)) == {FIRST, SECOND}
        assert check(replies[-1], models, reference) == {SECOND}
        assert draining.count("drained_requests") > 0
        assert draining.count("cut_requests") == draining.router.interrupted == 0
        assert draining.count("drain_s") < LONG_S


async def test_replies_that_do_not_end_in_time_go_on_under_the_new_weights(
    engine: EngineCalls, reference: Reference
) -> None:
    models = {FIRST: engine.server.model, SECOND: engine.server.other_model}
    async with _draining(engine, SHORT_S) as draining:
        sessions = await start_sessions(draining.router, engine)
        await draining.publisher.publish(draining.manifest)
        replies = await sessions.finish()
        assert {FIRST, SECOND} in [check(parts, models, reference) for parts in replies]
        assert 0 < draining.router.interrupted <= draining.count("cut_requests")
        assert draining.router.regenerated == 0


async def test_requests_of_others_end_in_time_or_are_cut_at_the_deadline(engine: EngineCalls) -> None:
    async with _draining(engine, LONG_S) as draining:
        short = await engine.start_running(PROMPT, max_new_tokens=100)
        await draining.publisher.publish(draining.manifest)
        assert (await short.answer)["meta_info"]["finish_reason"]["type"] == "length"
        assert draining.count("drain_s") < LONG_S
    await engine.restore()
    async with _draining(engine, SHORT_S) as draining:
        long = await engine.start_running(PROMPT)
        await draining.publisher.publish(draining.manifest)
        answer = await long.answer
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < ENDLESS_TOKENS
        assert draining.count("drain_s") >= SHORT_S
