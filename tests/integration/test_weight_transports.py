from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineCalls, Reference
from fleet_sessions import BUCKET_BYTES, LOAD_S, check, make_manifest, make_transport, play, start_sessions

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.protocols import WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode
from agentrl.weights.broadcast import BroadcastTransport
from agentrl.weights.config import (
    BroadcastTransportConfig,
    PublishConfig,
)
from agentrl.weights.publisher import StagedPublisher

pytestmark = pytest.mark.long

DOOMED_LOAD_S = 45.0
FIRST, SECOND, THIRD = (PolicyVersion(0, step) for step in range(3))


@pytest.fixture
async def fleet(embedded: EngineCalls, exact_engine: EngineCalls) -> dict[str, EngineCalls]:
    """Two real engines by name, both at version 0.0."""
    return {"a": embedded, "b": exact_engine}


@pytest.fixture
async def doomed(engine_model: Path, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    """An engine that a test may stop; its control calls give up after three seconds."""
    config = EmbeddedEngineConfig(args={"max_running_requests": 4})
    launch = EngineLaunch("main", "doomed", engine_model, FIRST, config, False, tmp_path)
    process = await EngineProcess.start(launch, ClientConfig(control_s=3.0, load_s=DOOMED_LOAD_S), LocalPlace())
    yield process
    os.kill(process.pid, signal.SIGCONT)
    await process.close()


def _publisher(router: EngineRouter, transport: WeightTransport, patience_s: float = 2.0) -> StagedPublisher:
    first = WeightsManifest("main", FIRST, "/no/first/weights", {}, 0)
    return StagedPublisher(router.fleet, transport, PublishConfig(patience_s=patience_s), first)


@pytest.mark.parametrize("kind", ["disk", "broadcast", "tensors", "delta"])
async def test_two_publications_under_load_reach_every_engine_by_every_transport(
    fleet: dict[str, EngineCalls],
    engine_model: Path,
    other_model: Path,
    reference: Reference,
    tmp_path: Path,
    kind: str,
) -> None:
    clients = [EngineClient(n, c.server.url, ClientConfig(), PauseMode.ABORT, c.server.token) for n, c in fleet.items()]
    router = EngineRouter(Fleet(clients, FIRST))
    transport = make_transport(kind, tmp_path)
    publisher = _publisher(router, transport, patience_s=60.0)
    models = {FIRST: engine_model, SECOND: other_model, THIRD: engine_model}
    seen: set[PolicyVersion] = set()
    for version in (SECOND, THIRD):
        sessions = await start_sessions(router, *fleet.values())
        receipts = await publisher.publish(make_manifest(models[version], version))
        reached = {(receipt.engine, receipt.version) for receipt in receipts}
        assert reached == {("a", version), ("b", version)}, router.fleet.aside
        for parts in await sessions.finish():
            seen |= check(parts, models, reference)
    assert FIRST in seen
    assert len(seen) > 1
    after = await asyncio.gather(*(play(router, f"after-{seed:04d}", seed) for seed in (1, 2)))
    assert [check(parts, models, reference) for parts in after] == [{THIRD}, {THIRD}]
    await publisher.close()
    await router.fleet.members["a"].engine.close()
    await router.fleet.members["b"].engine.close()


@pytest.mark.parametrize("kind", ["disk", "broadcast", "tensors"])
async def test_a_stopped_engine_holds_nobody_and_is_named_with_its_phase(
    embedded: EngineCalls,
    doomed: EngineProcess,
    engine_model: Path,
    other_model: Path,
    reference: Reference,
    tmp_path: Path,
    kind: str,
) -> None:
    healthy = embedded.server.client()
    router = EngineRouter(Fleet([doomed.client, healthy], FIRST))
    transport = make_transport(kind, tmp_path)
    original = transport.send

    async def stop_then_send(engine: Any, manifest: WeightsManifest) -> None:
        if engine.name == "doomed":
            os.kill(doomed.pid, signal.SIGSTOP)
        await original(engine, manifest)

    transport.send = stop_then_send  # type: ignore[method-assign]
    publisher = _publisher(router, transport)
    started = time.monotonic()
    receipts = await publisher.publish(make_manifest(other_model, SECOND))
    # It has not waited for the stopped engine, unless the other one took as long as that may take.
    assert "doomed" not in router.fleet.aside or time.monotonic() - started > DOOMED_LOAD_S
    assert [(receipt.engine, receipt.version) for receipt in receipts] == [("engine", SECOND)]
    async with asyncio.timeout(120):
        while "doomed" not in router.fleet.aside:
            await router.fleet.wait_for_change()
    assert "swap of version 0.1 failed" in router.fleet.aside["doomed"]
    parts = await play(router, "session-0000", 1)
    assert check(parts, {SECOND: other_model}, reference) == {SECOND}
    await publisher.close()
    await healthy.close()


async def test_a_sender_killed_in_mid_broadcast_costs_only_its_engine_and_names_the_bucket(
    fleet: dict[str, EngineCalls], engine_model: Path, other_model: Path, reference: Reference, tmp_path: Path
) -> None:
    clients = [EngineClient(n, c.server.url, ClientConfig(), PauseMode.ABORT, c.server.token) for n, c in fleet.items()]
    router = EngineRouter(Fleet(clients, FIRST))
    transport = BroadcastTransport(BroadcastTransportConfig(bucket_bytes=BUCKET_BYTES, join_s=LOAD_S), LOAD_S, tmp_path)
    original = transport._broadcast

    async def kill_then_send(link: Any, index: int) -> None:
        if link is transport._links.get("b") and index == 1:
            os.kill(link.sender._child.pid, signal.SIGKILL)
        await original(link, index)

    transport._broadcast = kill_then_send  # type: ignore[method-assign]
    publisher = _publisher(router, transport)
    receipts = await publisher.publish(make_manifest(other_model, SECOND))
    assert [receipt.engine for receipt in receipts] == ["a"]
    async with asyncio.timeout(120):
        while "b" not in router.fleet.aside:
            await router.fleet.wait_for_change()
    assert "prepare of version 0.1 failed: bucket 2 of " in router.fleet.aside["b"]
    info = await fleet["b"].info()
    assert info["weight_version"] == "0.0"
    served = (await fleet["b"].ok("/weights_checker", action="checksum"))["checksums"]
    assert served == make_manifest(engine_model, SECOND).checksums
    transport._broadcast = original  # type: ignore[method-assign]
    assert (await publisher.sync("b")).version == SECOND
    parts = await play(router, "session-0000", 1)
    assert check(parts, {SECOND: other_model}, reference) == {SECOND}
    await publisher.close()
    for client in clients:
        await client.close()
