"""How long an engine stands still for new weights, by transport: SmolLM2-135M on an embedded engine under load.

Weights of two versions go to the engine in turn, while two requests are always being generated.

Figures: `transports`, each with `gap_s`, from the pause to the end of the resumption (mean of `publications`), and
`seconds` of the whole publication; `broadcast_over_gloo`, the time in which the broadcast's buckets reach the engine
over that of a bare gloo broadcast of the same bytes between two processes, both beside the same load, and
`broadcast_over_gloo_idle`, both without any;
`lora_extra_bytes_fraction`, the bytes that a LoRA publication sends beside the adapter's tensors, as a fraction of
these; `lora_token_gap_ratio`, the mean time between two tokens of a bystander while adapters load, over that of as many
tokens behind each load (`lora_loads` loads; `lora_token_gap_low` and `_high` its 95 % interval),
`lora_token_gap_elsewhere`, the same while a process that has nothing to do with the engine gets the same bytes by as
many calls (with `_low` and `_high`), which is what the machine itself asks for them, `lora_token_gap_control`, of two
windows without anything, and `lora_first_gap_ratio`, of the loads before those, which make room;
`in_place_pause_ms`, by how much the longest time between two tokens that spans a swap in place (median of several)
exceeds `decode_step_ms`, the median time between two tokens; `in_place_call_ms`, the call that swaps, which waits for
the step under way.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.inference.fleet import Fleet
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.process.ports import free_port
from agentrl.protocols import Engine, WeightTransport
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode, WeightSource
from agentrl.weights.broadcast import BroadcastTransport
from agentrl.weights.buckets import Bucket
from agentrl.weights.config import (
    BroadcastTransportConfig,
    DeltaTransportConfig,
    PublishConfig,
    TensorTransportConfig,
)
from agentrl.weights.delta import DeltaTransport
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.sender import SenderProcess
from agentrl.weights.tensors import TensorTransport
from tests.benchmarks.adapter_gap import measure_adapter
from tests.benchmarks.publish_load import (
    CHANGED_FRACTION,
    FIRST,
    LOAD_S,
    load,
    make_weights,
    no_load,
    token_gaps,
    until_tokens,
)
from tests.benchmarks.report import report

Surroundings = Callable[[str], AbstractAsyncContextManager[None]]
PUBLICATIONS = 4


class Bench:
    """One engine, two weight sets, and the version that comes next."""

    def __init__(self, client: EngineClient, manifests: tuple[WeightsManifest, WeightsManifest], logs: Path) -> None:
        self.client, self.logs = client, logs
        self._manifests = manifests
        self._version = FIRST

    def manifest(self) -> WeightsManifest:
        """The other weights, as the next version."""
        self._version = self._version.next()
        return dataclasses.replace(self._manifests[self._version.step % 2], version=self._version)

    async def publish(
        self, transport: WeightTransport, manifests: list[WeightsManifest], beside: Surroundings = load
    ) -> list[Receipt]:
        """Publish beside a load; the first publication, which forms groups and the like, does not count."""
        fleet = Fleet([self.client], FIRST)
        publisher = StagedPublisher(fleet, transport, PublishConfig(), manifests[0])
        receipts = []
        async with beside(self.client.url):
            for manifest in manifests:
                receipts += await publisher.publish(manifest)
        await publisher.close()
        return receipts[1:]


async def measure_transport(bench: Bench, name: str, transport: WeightTransport) -> dict[str, object]:
    receipts = await bench.publish(transport, [bench.manifest() for _ in range(PUBLICATIONS + 1)])
    return {
        "transport": name,
        "gap_s": round(statistics.mean(receipt.gap_s for receipt in receipts), 4),
        "seconds": round(statistics.mean(receipt.seconds for receipt in receipts), 3),
    }


class _TimedEngine:
    """The calls of an engine that a broadcast makes, of which those that stage weights are timed."""

    def __init__(self, engine: Engine, times: list[float]) -> None:
        self.name, self.join_group, self.leave_group = engine.name, engine.join_group, engine.leave_group
        self._engine, self._times = engine, times

    async def stage(self, source: WeightSource, version: PolicyVersion) -> None:
        started = time.monotonic()
        await self._engine.stage(source, version)
        self._times.append(time.monotonic() - started)


class _TimedBroadcast(BroadcastTransport):
    """Sums up how long the buckets of each publication are on their way, from the call to the engine's answer."""

    def __init__(self, logs: Path) -> None:
        super().__init__(BroadcastTransportConfig(), LOAD_S, logs)
        self.times: list[float] = []

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        await super().prepare(_TimedEngine(engine, self.times), manifest)  # type: ignore[arg-type]


async def measure_broadcast(bench: Bench, beside: Surroundings) -> float:
    """Seconds of the buckets' way to the engine over those of a bare broadcast of the same bytes, load and all."""
    transport = _TimedBroadcast(bench.logs)
    manifests = [bench.manifest() for _ in range(PUBLICATIONS + 1)]
    await bench.publish(transport, manifests, beside)
    async with beside(bench.client.url):
        bare_s = await _bare_gloo_s(Path(manifests[0].path), bench.logs)
    return statistics.median(transport.times[1:]) / bare_s


async def _bare_gloo_s(folder: Path, logs: Path) -> float:
    """Two senders, of which one receives: both call broadcast, rank 1 into what it holds already."""
    config = BroadcastTransportConfig()
    pair = [await SenderProcess.start(f"bare-{rank}", logs / f"bare-{rank}.log") for rank in range(2)]
    arguments = ("127.0.0.1", free_port(), 2, "bare", "gloo", config.join_s, 0)
    joins = (s.call("join", rank, *arguments, result=type(None), deadline_s=60.0) for rank, s in enumerate(pair))
    await asyncio.gather(*joins)
    times = []
    for _ in range(PUBLICATIONS + 1):
        opens = (s.call("open", str(folder), config.bucket_bytes, result=list[Bucket], deadline_s=LOAD_S) for s in pair)
        buckets, _ = await asyncio.gather(*opens)
        started = time.monotonic()
        for index in range(len(buckets)):
            sends = (s.call("broadcast", index, result=type(None), deadline_s=LOAD_S) for s in pair)
            await asyncio.gather(*sends)
        times.append(time.monotonic() - started)
    for sender in pair:
        sender.kill()
    return statistics.median(times[1:])


class _TimedDisk(DiskTransport):
    """Says how long each swap took, from the call to the engine's answer."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        started = time.monotonic()
        await super().send(engine, manifest)
        self.times.append(time.monotonic() - started)


async def measure_in_place(bench: Bench) -> dict[str, float]:
    """A swap in place: its call, and the gaps between two tokens around it."""
    client = EngineClient("in-place", bench.client.url, ClientConfig(load_s=LOAD_S), PauseMode.IN_PLACE)
    gaps: list[float] = []
    around: list[float] = []
    bystander = asyncio.create_task(token_gaps(client.url, gaps))
    await until_tokens(gaps, 20)
    step_s = statistics.median(gaps[2:])
    inner = Bench(client, bench._manifests, bench.logs)
    inner._version = PolicyVersion(2, 0)
    transport = _TimedDisk()
    fleet = Fleet([client], PolicyVersion(2, 0))
    publisher = StagedPublisher(fleet, transport, PublishConfig(pause_mode=PauseMode.IN_PLACE), inner.manifest())
    for _ in range(2 * PUBLICATIONS):
        manifest = inner.manifest()
        await transport.prepare(client, manifest)
        await until_tokens(gaps, len(gaps) + 2)
        seen = len(gaps)
        await publisher.publish(manifest)
        await until_tokens(gaps, seen + 2)
        around.append(max(gaps[seen : seen + 2]))
    bystander.cancel()
    await client.abort_all()
    await client.close()
    return {
        "in_place_pause_ms": 1000 * (statistics.median(around) - step_s),
        "in_place_call_ms": 1000 * statistics.median(transport.times),
        "decode_step_ms": 1000 * step_s,
    }


async def measure(model: Path, folder: Path) -> None:
    manifests = make_weights(model, folder)
    launch = EngineLaunch("main", "bench", Path(manifests[0].path), FIRST, EmbeddedEngineConfig(), False, folder)
    engine = await EngineProcess.start(launch, ClientConfig(load_s=LOAD_S), LocalPlace())
    bench = Bench(engine.client, manifests, folder)
    tensors = TensorTransport(TensorTransportConfig(), LOAD_S, folder)
    broadcast = BroadcastTransport(BroadcastTransportConfig(), LOAD_S, folder)
    delta = DeltaTransport(DeltaTransportConfig(folder=folder / "host"), LOAD_S, folder)
    try:
        transports = [
            await measure_transport(bench, "disk", DiskTransport()),
            await measure_transport(bench, "tensors", tensors),
            await measure_transport(bench, "broadcast", broadcast),
            await measure_transport(bench, "delta", delta),
        ]
        ratio, idle_ratio = await measure_broadcast(bench, load), await measure_broadcast(bench, no_load)
        in_place = await measure_in_place(bench)
        lora = await measure_adapter(engine.client, model, folder)
    finally:
        with suppress(ProcessLookupError):
            await engine.close()
    transports.append({"transport": "adapter", "gap_s": lora.pop("gap_s"), "seconds": lora.pop("seconds")})
    report(
        "publish_gap",
        transports=transports,
        broadcast_over_gloo=round(ratio, 3),
        broadcast_over_gloo_idle=round(idle_ratio, 3),
        **{name: round(value, 4) for name, value in lora.items()},
        **{name: round(value, 2) for name, value in in_place.items()},
        delta_sent_fraction=round(delta.sent_bytes / ((PUBLICATIONS + 1) * manifests[0].num_bytes), 4),
        changed_fraction=CHANGED_FRACTION,
        publications=PUBLICATIONS,
        weights_bytes=manifests[0].num_bytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    model = parser.parse_args().model
    if not (model / "model.safetensors").is_file():
        raise SystemExit(
            f"no model at {model}; make it with `agentrl warmstart environments/facts/smollm2-import.toml`"
        )
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(model, Path(folder)))


if __name__ == "__main__":
    main()
