"""Publishing to any server under load: every transport, and a model spread over two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_server import EngineCalls, Reference
from fleet_sessions import LOAD_S, PROMPT, check, make_manifest, make_transport, play, start_sessions

from agentrl.inference.config import ClientConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.protocols import WeightTransport
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher

pytestmark = pytest.mark.long

FIRST, SECOND, THIRD = (PolicyVersion(0, step) for step in range(3))


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
