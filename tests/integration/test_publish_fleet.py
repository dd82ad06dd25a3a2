from __future__ import annotations

import dataclasses
import os
import re
import signal
from pathlib import Path

import pytest
from engine_server import EngineCalls, EngineServer, Reference
from fleet_sessions import check, make_manifest, play, start_sessions

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.protocols import WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EpisodeError, PublishError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher

pytestmark = pytest.mark.long

FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)


class CrossedTransport(DiskTransport):
    """Sends one engine other weights than the manifest's."""

    def __init__(self, victim: str, wrong: Path) -> None:
        super().__init__()
        self._victim, self._wrong = victim, wrong

    async def send(self, engine: EngineClient, manifest: WeightsManifest) -> None:
        wrong = dataclasses.replace(manifest, path=str(self._wrong))
        await super().send(engine, wrong if engine.name == self._victim else manifest)


class UnstagedTransport(DiskTransport):
    """Lets engines take nothing before their pause, like a server that cannot."""

    async def prepare(self, engine: EngineClient, manifest: WeightsManifest) -> None:
        """Nothing."""


@pytest.fixture
async def fleet(embedded: EngineCalls, exact_engine: EngineCalls) -> dict[str, EngineCalls]:
    """Two real engines by name, both at version 0.0."""
    return {"a": embedded, "b": exact_engine}


def _router(fleet: dict[str, EngineCalls], mode: PauseMode = PauseMode.ABORT) -> EngineRouter:
    servers = {name: calls.server for name, calls in fleet.items()}
    clients = [EngineClient(n, s.url, ClientConfig(), mode, s.token) for n, s in servers.items()]
    return EngineRouter(Fleet(clients, FIRST))


def _publisher(router: EngineRouter, transport: WeightTransport | None = None) -> StagedPublisher:
    first = WeightsManifest("main", FIRST, "/no/first/weights", {}, 0)
    return StagedPublisher(router.fleet, transport or DiskTransport(), PublishConfig(patience_s=60.0), first)


async def _close(router: EngineRouter) -> None:
    for member in router.fleet.members.values():
        await member.engine.close()


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT])
async def test_requests_in_flight_go_on_under_the_new_version_with_no_token_lost(
    fleet: dict[str, EngineCalls], engine_model: Path, other_model: Path, reference: Reference, mode: PauseMode
) -> None:
    router = _router(fleet, mode)
    publisher = _publisher(router)
    manifest = make_manifest(other_model, SECOND)
    sessions = await start_sessions(router, *fleet.values())
    receipts = await publisher.publish(manifest)
    assert {(receipt.engine, receipt.version) for receipt in receipts} == {("a", SECOND), ("b", SECOND)}
    assert sum(receipt.aborted for receipt in receipts) > 0
    models = {FIRST: engine_model, SECOND: other_model}
    versions = [check(parts, models, reference) for parts in await sessions.finish()]
    assert {FIRST, SECOND} in versions
    assert router.regenerated == 0
    await _close(router)


@pytest.mark.parametrize("is_ahead", [True, False], ids=["without a pause", "paused"])
async def test_requests_frozen_in_place_keep_the_old_cache_and_say_so(
    fleet: dict[str, EngineCalls], other_model: Path, is_ahead: bool
) -> None:
    router = _router(fleet, PauseMode.IN_PLACE)
    manifest = make_manifest(other_model, SECOND)
    sessions = await start_sessions(router, *fleet.values())
    receipts = await _publisher(router, DiskTransport() if is_ahead else UnstagedTransport()).publish(manifest)
    assert all((receipt.gap_s == 0.0) is is_ahead for receipt in receipts)
    played = await sessions.finish()
    assert {len(parts) for parts in played} == {1}, "a frozen request needs no second call"
    parts = [part for (part,) in played]
    switched = [part for part in parts if {span.version for span in part.versions} == {FIRST, SECOND}]
    assert switched
    assert all({span.version for span in part.kv_versions} == {FIRST} for part in switched)
    await _close(router)


async def test_an_engine_with_other_weights_serves_nobody_until_the_next_publish_mends_it(
    fleet: dict[str, EngineCalls], engine_model: Path, other_model: Path, reference: Reference
) -> None:
    router = _router(fleet)
    publisher = _publisher(router, CrossedTransport("b", engine_model))
    manifest = make_manifest(other_model, SECOND)
    sessions = await start_sessions(router, *fleet.values())
    receipts = await publisher.publish(manifest)
    assert [receipt.engine for receipt in receipts] == ["a"]
    assert router.fleet.healthy == ["a"]
    assert "receipt of version 0.1 failed" in router.fleet.aside["b"]
    assert "tensors differ from the published ones" in router.fleet.aside["b"]
    models = {FIRST: engine_model, SECOND: other_model}
    for parts in await sessions.finish():
        check(parts, models, reference)
    third = make_manifest(engine_model, PolicyVersion(0, 2))
    mending = _publisher(router)
    await mending.publish(third)
    assert (await mending.sync("b")).version == PolicyVersion(0, 2)
    assert router.fleet.healthy == ["a", "b"]
    await _close(router)


async def test_a_publish_that_reaches_no_engine_names_phase_engine_and_cause(
    fleet: dict[str, EngineCalls], other_model: Path
) -> None:
    router = _router(fleet)
    publisher = _publisher(router)
    missing = dataclasses.replace(make_manifest(other_model, SECOND), path="/no/such/folder")
    with pytest.raises(
        PublishError, match=r"version 0.1 of policy 'main' reached no engine: a: prepare of .*b: prepare of "
    ):
        await publisher.publish(missing)
    manifest = make_manifest(other_model, SECOND)
    name = next(iter(manifest.checksums))
    wrong = dataclasses.replace(manifest, checksums=manifest.checksums | {name: "0" * 16})
    router.fleet.proven("a")
    with pytest.raises(PublishError, match=f"a: receipt of version 0.1 failed: 1 of .* such as {name}"):
        await publisher.publish(wrong)
    with pytest.raises(EpisodeError, match="no engine serves this policy"):
        await play(router, "session-0000", 0)
    await _close(router)


async def test_a_killed_engine_is_set_aside_and_its_sessions_finish_on_the_other(
    embedded: EngineCalls, engine_model: Path, other_model: Path, reference: Reference, tmp_path: Path
) -> None:
    config = EmbeddedEngineConfig(args={"max_running_requests": 4})
    launch = EngineLaunch("main", "doomed", engine_model, FIRST, config, False, tmp_path)
    doomed = await EngineProcess.start(launch, ClientConfig(), LocalPlace())
    doomed_calls = EngineCalls(EngineServer(doomed.client.url, engine_model, other_model))
    survivor = embedded.server.client()
    router = EngineRouter(Fleet([doomed.client, survivor], FIRST))
    publisher = _publisher(router)
    sessions = await start_sessions(router, embedded, doomed_calls)
    os.kill(doomed.pid, signal.SIGKILL)
    assert re.match(r"engine doomed ended \(signal 9\).*doomed\.log", await doomed.ended())
    for parts in await sessions.finish():
        assert check(parts, {FIRST: engine_model}, reference) == {FIRST}
    assert router.regenerated > 0

    receipts = await publisher.publish(make_manifest(other_model, SECOND))
    assert [receipt.engine for receipt in receipts] == ["engine"]
    assert "prepare of version 0.1 failed" in router.fleet.aside["doomed"]
    assert router.fleet.healthy == ["engine"]
    alone = _publisher(EngineRouter(Fleet([doomed.client], FIRST)))
    with pytest.raises(
        PublishError, match=r"reached no engine: doomed: prepare of version 0.1 failed: .*ConnectorError"
    ):
        await alone.publish(make_manifest(other_model, SECOND))
    await doomed.close()
    await doomed.close()
    await doomed_calls.http.aclose()
    await survivor.close()
