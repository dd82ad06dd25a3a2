from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_server import EngineCalls, Reference
from safetensors.torch import load_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.engines import EngineLaunch, EngineProcess
from agentrl.protocols import WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, append_spans
from agentrl.weights.broadcast import BroadcastTransport
from agentrl.weights.config import (
    BroadcastTransportConfig,
    DeltaTransportConfig,
    PublishConfig,
    TensorTransportConfig,
)
from agentrl.weights.delta import DeltaTransport
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.tensors import TensorTransport

pytestmark = pytest.mark.long

FIRST, SECOND, THIRD = (PolicyVersion(0, step) for step in range(3))
PROMPT = [20, 31, 42, 53, 64, 75, 86]
NUM_TOKENS = 160
LONG_SEEDS = (1, 10, 11, 15, 21, 22)  # draw no end token that early
BUCKET_BYTES = 60_000
LOAD_S = 30.0


def _transports(folder: Path) -> dict[str, Callable[[], WeightTransport]]:
    broadcast = BroadcastTransportConfig(bucket_bytes=BUCKET_BYTES, join_s=30.0)
    tensors = TensorTransportConfig(bucket_bytes=BUCKET_BYTES)
    return {
        "disk": DiskTransport,
        "broadcast": lambda: BroadcastTransport(broadcast, LOAD_S, True, folder),
        "tensors": lambda: TensorTransport(tensors, LOAD_S, True, folder),
        "delta": lambda: DeltaTransport(DeltaTransportConfig(folder=folder / "host"), LOAD_S, folder),
    }


@pytest.fixture
async def fleet(embedded: EngineCalls, exact_engine: EngineCalls) -> dict[str, EngineCalls]:
    """Two real engines by name, both at version 0.0."""
    return {"a": embedded, "b": exact_engine}


@pytest.fixture
async def doomed(engine_model: Path, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    """An engine that a test may stop; its control calls give up after three seconds."""
    config = EmbeddedEngineConfig(args={"max_running_requests": 4})
    launch = EngineLaunch("main", "doomed", engine_model, FIRST, config, False, tmp_path)
    process = await EngineProcess.start(launch, ClientConfig(control_s=3.0, load_s=15.0), PublishConfig())
    yield process
    os.kill(process._process.pid, signal.SIGCONT)
    await process.close()


def _publisher(router: EngineRouter, transport: WeightTransport) -> StagedPublisher:
    first = WeightsManifest("main", FIRST, "/no/first/weights", {}, 0)
    return StagedPublisher(router.fleet, transport, PublishConfig(), first)


def _manifest(folder: Path, version: PolicyVersion = SECOND) -> WeightsManifest:
    tensors = load_file(folder / "model.safetensors")
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    return WeightsManifest("main", version, str(folder), checksums, sum(t.nbytes for t in tensors.values()))


async def _play(router: EngineRouter, session: str, seed: int) -> list[Generation]:
    """Generate as a session does: whatever is aborted goes on from its tokens."""
    parts: list[Generation] = []
    done: list[int] = []
    while len(done) < NUM_TOKENS:
        ids = np.asarray(PROMPT + done, np.int32)
        rid = f"{session}-{len(parts):04d}"
        request = GenerationRequest(rid, session, ids, NUM_TOKENS - len(done), (), Sampling(), seed)
        parts.append(await router.generate(request))
        done += parts[-1].token_ids.tolist()
        if parts[-1].finish is FinishReason.STOP:
            break
    return parts


def _start_sessions(router: EngineRouter) -> list[asyncio.Task[list[Generation]]]:
    return [asyncio.create_task(_play(router, f"session-{n:04d}", seed)) for n, seed in enumerate(LONG_SEEDS)]


def _check(parts: list[Generation], models: dict[PolicyVersion, Path], reference: Reference) -> set[PolicyVersion]:
    """Every token's logprob is that of the weights which its span names."""
    output = [token for part in parts for token in part.token_ids.tolist()]
    logprobs = [logprob for part in parts for logprob in part.logprobs.tolist()]
    spans: Any = ()
    for part in parts:
        spans = append_spans(spans, part.versions)
    for span in spans:
        expected = reference.sampled(models[span.version], PROMPT, output)[span.start : span.end]
        assert logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-3)
    return {span.version for span in spans}


@pytest.mark.parametrize("kind", ["disk", "broadcast", "tensors", "delta"])
async def test_two_publications_under_load_reach_every_engine_by_every_transport(
    fleet: dict[str, EngineCalls],
    engine_model: Path,
    other_model: Path,
    reference: Reference,
    tmp_path: Path,
    kind: str,
) -> None:
    clients = [EngineClient(n, c.server.url, ClientConfig(), "abort", c.server.token) for n, c in fleet.items()]
    router = EngineRouter(Fleet(clients, FIRST))
    transport = _transports(tmp_path)[kind]()
    publisher = _publisher(router, transport)
    models = {FIRST: engine_model, SECOND: other_model, THIRD: engine_model}
    seen: set[PolicyVersion] = set()
    for version in (SECOND, THIRD):
        tasks = _start_sessions(router)
        for calls in fleet.values():
            await calls.wait_for(running=3)
        receipts = await publisher.publish(_manifest(models[version], version))
        assert {(receipt.engine, receipt.version) for receipt in receipts} == {("a", version), ("b", version)}
        for parts in await asyncio.gather(*tasks):
            seen |= _check(parts, models, reference)
    assert FIRST in seen
    assert len(seen) > 1
    after = await asyncio.gather(*(_play(router, f"after-{seed:04d}", seed) for seed in LONG_SEEDS[:2]))
    assert [_check(parts, models, reference) for parts in after] == [{THIRD}, {THIRD}]
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
    transport = _transports(tmp_path)[kind]()
    original = transport.send

    async def stop_then_send(engine: Any, manifest: WeightsManifest) -> None:
        if engine.name == "doomed":
            os.kill(doomed._process.pid, signal.SIGSTOP)
        await original(engine, manifest)

    transport.send = stop_then_send  # type: ignore[method-assign]
    publisher = _publisher(router, transport)
    started = time.monotonic()
    receipts = await publisher.publish(_manifest(other_model))
    assert time.monotonic() - started < 60
    assert [(receipt.engine, receipt.version) for receipt in receipts] == [("engine", SECOND)]
    async with asyncio.timeout(60):
        while "doomed" not in router.fleet.aside:
            await router.fleet.wait_for_change()
    assert "swap of version 0.1 failed" in router.fleet.aside["doomed"]
    (parts,) = await asyncio.gather(_play(router, "session-0000", LONG_SEEDS[0]))
    assert _check(parts, {SECOND: other_model}, reference) == {SECOND}
    await publisher.close()
    await healthy.close()


async def test_a_sender_killed_in_mid_broadcast_costs_only_its_engine_and_names_the_bucket(
    fleet: dict[str, EngineCalls], engine_model: Path, other_model: Path, reference: Reference, tmp_path: Path
) -> None:
    clients = [EngineClient(n, c.server.url, ClientConfig(), "abort", c.server.token) for n, c in fleet.items()]
    router = EngineRouter(Fleet(clients, FIRST))
    transport = BroadcastTransport(BroadcastTransportConfig(bucket_bytes=BUCKET_BYTES, join_s=30.0), 30, True, tmp_path)
    original = transport._send_bucket

    async def kill_then_send(engine: Any, link: Any, index: int, body: dict[str, Any], what: str) -> None:
        if engine.name == "b" and index == 1:
            os.kill(link.sender._child.pid, signal.SIGKILL)
        await original(engine, link, index, body, what)

    transport._send_bucket = kill_then_send  # type: ignore[method-assign]
    publisher = _publisher(router, transport)
    receipts = await publisher.publish(_manifest(other_model))
    assert [receipt.engine for receipt in receipts] == ["a"]
    async with asyncio.timeout(60):
        while "b" not in router.fleet.aside:
            await router.fleet.wait_for_change()
    assert "swap of version 0.1 failed: bucket 2 of " in router.fleet.aside["b"]
    info = await fleet["b"].info()
    assert info["weight_version"] == "0.0"
    served = (await fleet["b"].ok("/weights_checker", action="checksum"))["checksums"]
    assert served == _manifest(engine_model).checksums
    transport._send_bucket = original  # type: ignore[method-assign]
    assert (await publisher.sync("b")).version == SECOND
    parts = await _play(router, "session-0000", LONG_SEEDS[0])
    assert _check(parts, {SECOND: other_model}, reference) == {SECOND}
    await publisher.close()
    for client in clients:
        await client.close()
