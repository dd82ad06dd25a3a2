"""Sessions over a fleet of real engines, and the proof that each token is of the weights that its span names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from engine_server import EngineCalls, Reference
from safetensors.torch import load_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.inference.router import EngineRouter
from agentrl.protocols import WeightTransport
from agentrl.types.batch import WeightsManifest
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan, append_spans
from agentrl.weights.broadcast import BroadcastTransport
from agentrl.weights.config import BroadcastTransportConfig, DeltaTransportConfig, TensorTransportConfig
from agentrl.weights.delta import DeltaTransport
from agentrl.weights.disk import DiskTransport
from agentrl.weights.tensors import TensorTransport

PROMPT = [20, 31, 42, 53, 64, 75, 86]
NUM_TOKENS = 480
NUM_SESSIONS = 6
FEW_RUNNING = 2
BUCKET_BYTES = 60_000
LOAD_S = 180.0


def make_manifest(folder: Path, version: PolicyVersion) -> WeightsManifest:
    """What a trainer would say of the weights in a folder."""
    tensors = load_file(folder / "model.safetensors")
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    return WeightsManifest("main", version, str(folder), checksums, sum(t.nbytes for t in tensors.values()))


def make_transport(kind: str, folder: Path, num_ranks: int = 1) -> WeightTransport:
    """A transport by its kind, with buckets that are small beside the tiny model."""
    broadcast = BroadcastTransportConfig(bucket_bytes=BUCKET_BYTES, join_s=LOAD_S, ranks_per_engine=num_ranks)
    tensors = TensorTransportConfig(bucket_bytes=BUCKET_BYTES, ranks_per_engine=num_ranks)
    match kind:
        case "broadcast":
            return BroadcastTransport(broadcast, LOAD_S, folder)
        case "tensors":
            return TensorTransport(tensors, LOAD_S, folder)
        case "delta":
            return DeltaTransport(DeltaTransportConfig(folder=folder / "host"), LOAD_S, folder)
    return DiskTransport()


async def play(router: EngineRouter, session: str, seed: int, num_tokens: int = NUM_TOKENS) -> list[Generation]:
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


class Sessions:
    """Sessions that ask for one generation after another until they are told to finish, however fast engines are."""

    def __init__(self, router: EngineRouter, name: str) -> None:
        self._router, self._name = router, name
        self._is_finishing = False
        self.tasks = [asyncio.create_task(self._session(n)) for n in range(NUM_SESSIONS)]

    async def _session(self, index: int) -> list[list[Generation]]:
        played: list[list[Generation]] = []
        while not self._is_finishing:
            name = f"{self._name}-{index:04d}-{len(played):04d}"
            played.append(await play(self._router, name, seed=index + NUM_SESSIONS * len(played)))
        return played

    async def finish(self) -> list[list[Generation]]:
        """The parts of every generation, when the last ones have ended."""
        self._is_finishing = True
        return [parts for played in await asyncio.gather(*self.tasks) for parts in played]


async def start_sessions(router: EngineRouter, *engines: EngineCalls, name: str = "session") -> Sessions:
    """Six sessions, of which several run on each engine when this returns."""
    sessions = Sessions(router, name)
    async with asyncio.timeout(30):
        for calls in engines:
            while (await calls.count())[0] < FEW_RUNNING and not any(task.done() for task in sessions.tasks):
                await asyncio.sleep(0.002)
    return sessions


def check(parts: list[Generation], models: Mapping[PolicyVersion, Path], reference: Reference) -> set[PolicyVersion]:
    """Every token's log-probability is that of the weights which its span names; returns the versions."""
    output = [token for part in parts for token in part.token_ids.tolist()]
    logprobs = [logprob for part in parts for logprob in part.logprobs.tolist()]
    assert parts[-1].finish is FinishReason.STOP or len(output) == NUM_TOKENS
    spans: tuple[VersionSpan, ...] = ()
    for part in parts:
        spans = append_spans(spans, part.versions)
    for span in spans:
        expected = reference.sampled(models[span.version], PROMPT, output)[span.start : span.end]
        assert logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-3)
    return {span.version for span in spans}
