from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from engine_server import EngineCalls, Reference
from safetensors.torch import load_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.inference.client import EngineClient, PauseMode
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.engines import EngineLaunch, EngineProcess
from agentrl.protocols import WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EpisodeError, PublishError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, append_spans
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher

pytestmark = pytest.mark.long

FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)
PROMPT = [20, 31, 42, 53, 64, 75, 86]
NUM_TOKENS = 160
LONG_SEEDS = (1, 10, 11, 15, 21, 22)  # draw no end token that early


class CrossedTransport(DiskTransport):
    """Sends one engine other weights than the manifest's."""

    def __init__(self, victim: str, wrong: Path) -> None:
        super().__init__()
        self._victim, self._wrong = victim, wrong

    async def send(self, engine: EngineClient, manifest: WeightsManifest) -> None:
        wrong = dataclasses.replace(manifest, path=str(self._wrong))
        await super().send(engine, wrong if engine.name == self._victim else manifest)


@pytest.fixture
async def fleet(embedded: EngineCalls, exact_engine: EngineCalls) -> dict[str, EngineCalls]:
    """Two real engines by name, both at version 0.0."""
    return {"a": embedded, "b": exact_engine}


def _router(fleet: dict[str, EngineCalls], mode: PauseMode = "abort") -> EngineRouter:
    servers = {name: calls.server for name, calls in fleet.items()}
    clients = [EngineClient(n, s.url, ClientConfig(), mode, s.token) for n, s in servers.items()]
    return EngineRouter(Fleet(clients, FIRST))


def _publisher(router: EngineRouter, transport: WeightTransport | None = None) -> StagedPublisher:
    first = WeightsManifest("main", FIRST, "/no/first/weights", {}, 0)
    return StagedPublisher(router.fleet, transport or DiskTransport(), PublishConfig(), first)


async def _close(router: EngineRouter) -> None:
    for member in router.fleet.members.values():
        await member.engine.close()


def _manifest(folder: Path, version: PolicyVersion = SECOND) -> WeightsManifest:
    tensors = load_file(folder / "model.safetensors")
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    return WeightsManifest("main", version, str(folder), checksums, 0)


async def _play(router: EngineRouter, session: str, seed: int, num_tokens: int = NUM_TOKENS) -> list[Generation]:
    """Generate as a session does: whatever is aborted goes on from its tokens."""
    parts: list[Generation] = []
    done: list[int] = []
    while len(done) < num_tokens:
        ids = np.asarray(PROMPT + done, np.int32)
        rid = f"{session}-{len(parts):04d}"
        request = GenerationRequest(rid, session, ids, num_tokens - len(done), (), Sampling(), seed)
        parts.append(await router.generate(request))
        done += parts[-1].token_ids.tolist()
        if parts[-1].finish is FinishReason.STOP:
            break
    return parts


async def _start_sessions(router: EngineRouter, fleet: dict[str, EngineCalls]) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(_play(router, f"session-{n:04d}", seed)) for n, seed in enumerate(LONG_SEEDS)]
    for calls in fleet.values():
        await calls.wait_for(running=3)
    return tasks


def _check(parts: list[Generation], models: dict[PolicyVersion, Path], reference: Reference) -> set[PolicyVersion]:
    """Every token's logprob is that of the weights which its span names."""
    output = [token for part in parts for token in part.token_ids.tolist()]
    logprobs = [logprob for part in parts for logprob in part.logprobs.tolist()]
    assert parts[-1].finish is FinishReason.STOP or len(output) == NUM_TOKENS
    spans = ()
    for part in parts:
        spans = append_spans(spans, part.versions)
    for span in spans:
        expected = reference.sampled(models[span.version], PROMPT, output)[span.start : span.end]
        assert logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-3)
    return {span.version for span in spans}


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_requests_in_flight_go_on_under_the_new_version_with_no_token_lost(
    fleet: dict[str, EngineCalls], engine_model: Path, other_model: Path, reference: Reference, mode: PauseMode
) -> None:
    router = _router(fleet, mode)
    publisher = _publisher(router)
    manifest = _manifest(other_model)
    tasks = await _start_sessions(router, fleet)
    receipts = await publisher.publish(manifest)
    assert {(receipt.engine, receipt.version) for receipt in receipts} == {("a", SECOND), ("b", SECOND)}
    assert sum(receipt.aborted for receipt in receipts) > 0
    models = {FIRST: engine_model, SECOND: other_model}
    versions = [_check(parts, models, reference) for parts in await asyncio.gather(*tasks)]
    assert {FIRST, SECOND} in versions
    assert router.regenerated == 0
    await _close(router)


async def test_requests_frozen_in_place_keep_the_old_cache_and_say_so(
    fleet: dict[str, EngineCalls], other_model: Path
) -> None:
    router = _router(fleet, "in_place")
    manifest = _manifest(other_model)
    tasks = await _start_sessions(router, fleet)
    await _publisher(router).publish(manifest)
    parts = [part for played in await asyncio.gather(*tasks) for part in played]
    assert len(parts) == 6, "a frozen request needs no second call"
    switched = [part for part in parts if part.versions[-1].version == SECOND]
    assert switched
    assert all({span.version for span in part.kv_versions} == {FIRST} for part in switched)
    assert all(part.versions[0].version == FIRST for part in switched)
    await _close(router)


async def test_an_engine_with_other_weights_serves_nobody_until_the_next_publish_mends_it(
    fleet: dict[str, EngineCalls], engine_model: Path, other_model: Path, reference: Reference
) -> None:
    router = _router(fleet)
    publisher = _publisher(router, CrossedTransport("b", engine_model))
    manifest = _manifest(other_model)
    tasks = await _start_sessions(router, fleet)
    receipts = await publisher.publish(manifest)
    assert [receipt.engine for receipt in receipts] == ["a"]
    assert router.fleet.healthy == ["a"]
    assert "receipt of version 0.1 failed" in router.fleet.aside["b"]
    assert "tensors differ from the published ones" in router.fleet.aside["b"]
    models = {FIRST: engine_model, SECOND: other_model}
    for parts in await asyncio.gather(*tasks):
        _check(parts, models, reference)
    third = _manifest(engine_model, PolicyVersion(0, 2))
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
    missing = dataclasses.replace(_manifest(other_model), path="/no/such/folder")
    with pytest.raises(
        PublishError, match=r"version 0.1 of policy 'main' reached no engine: a: prepare of .*b: prepare of "
    ):
        await publisher.publish(missing)
    manifest = _manifest(other_model)
    name = next(iter(manifest.checksums))
    wrong = dataclasses.replace(manifest, checksums=manifest.checksums | {name: "0" * 16})
    router.fleet.proven("a")
    with pytest.raises(PublishError, match=f"a: receipt of version 0.1 failed: 1 of .* such as {name}"):
        await publisher.publish(wrong)
    with pytest.raises(EpisodeError, match="no engine serves this policy"):
        await _play(router, "session-0000", 0)
    await _close(router)


async def test_a_killed_engine_is_set_aside_and_its_sessions_finish_on_the_other(
    embedded: EngineCalls, engine_model: Path, other_model: Path, reference: Reference, tmp_path: Path
) -> None:
    config = EmbeddedEngineConfig(args={"max_running_requests": 4})
    launch = EngineLaunch("main", "doomed", engine_model, FIRST, config, False, tmp_path)
    doomed = await EngineProcess.start(launch, ClientConfig(), PublishConfig())
    survivor = embedded.server.client()
    router = EngineRouter(Fleet([doomed.client, survivor], FIRST))
    publisher = _publisher(router)
    tasks = [asyncio.create_task(_play(router, f"session-{n:04d}", seed)) for n, seed in enumerate(LONG_SEEDS)]
    await embedded.wait_for(running=3)
    os.kill(doomed._process.pid, signal.SIGKILL)
    assert re.match(r"engine doomed ended \(signal 9\).*doomed\.log", await doomed.ended())
    for parts in await asyncio.gather(*tasks):
        assert _check(parts, {FIRST: engine_model}, reference) == {FIRST}
    assert router.regenerated == 3

    receipts = await publisher.publish(_manifest(other_model))
    assert [receipt.engine for receipt in receipts] == ["engine"]
    assert "prepare of version 0.1 failed" in router.fleet.aside["doomed"]
    assert router.fleet.healthy == ["engine"]
    alone = _publisher(EngineRouter(Fleet([doomed.client], FIRST)))
    with pytest.raises(PublishError, match=r"reached no engine: doomed: prepare of version 0.1 failed: .*ConnectError"):
        await alone.publish(_manifest(other_model))
    await doomed.close()
    await doomed.close()
    await survivor.close()
