"""How long an engine stands still for new weights, by transport: SmolLM2-135M on an embedded engine under load.

Weights of two versions go to the engine in turn, while two requests are always being generated.

Figures: `transports`, each with `gap_s`, from the pause to the end of the resumption (mean of `publications`), and
`seconds` of the whole publication; `broadcast_over_gloo`, the time in which the broadcast's buckets reach the engine
over that of a bare gloo broadcast of the same bytes between two processes; `lora_extra_bytes_fraction`, the bytes
that a LoRA publication sends beside the adapter's tensors, as a fraction of these; `lora_token_gap_ratio`, the
longest gap between two tokens of a bystander while an adapter loads, over his longest gap before;
`in_place_pause_ms`, the gap of a swap in place, beside `decode_step_ms`, the median time between two tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.inference.fleet import Fleet
from agentrl.orchestration.engines import EngineLaunch, EngineProcess
from agentrl.protocols import Engine, WeightTransport
from agentrl.trainer.checkpoint import weight_checksums
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import AdapterTransport
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
from tests.benchmarks.report import report
from tests.integration.lora_adapters import make_adapter

FIRST = PolicyVersion(0, 0)
PUBLICATIONS = 4
LOAD_S = 120.0
CHANGED_FRACTION = 0.02
RANK = 16
PROMPT = list(range(100, 140))


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

    async def publish(self, transport: WeightTransport, manifests: list[WeightsManifest]) -> list[Receipt]:
        """Publish under load; the first publication, which forms groups and the like, does not count."""
        fleet = Fleet([self.client], FIRST)
        publisher = StagedPublisher(fleet, transport, PublishConfig(), manifests[0])
        receipts = []
        async with _load(self.client.url):
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


async def measure_broadcast(bench: Bench) -> float:
    """Seconds of the buckets' way to the engine over those of a bare broadcast of the same bytes."""
    config = BroadcastTransportConfig()
    transport, times = BroadcastTransport(config, LOAD_S, True, bench.logs), []
    send = transport.send

    async def timed(engine: Engine, manifest: WeightsManifest) -> None:
        started = time.monotonic()
        await send(engine, manifest)
        times.append(time.monotonic() - started)

    transport.send = timed  # type: ignore[method-assign]
    manifests = [bench.manifest() for _ in range(PUBLICATIONS + 1)]
    await bench.publish(transport, manifests)
    return statistics.median(times[1:]) / await _bare_gloo_s(Path(manifests[0].path), config, bench.logs)


async def _bare_gloo_s(folder: Path, config: BroadcastTransportConfig, logs: Path) -> float:
    """Two senders, of which one receives: both call broadcast, rank 1 into what it holds already."""
    pair = [await SenderProcess.start(f"bare-{rank}", logs / f"bare-{rank}.log") for rank in range(2)]
    arguments = ("127.0.0.1", 29631, 2, "bare", "gloo", config.join_s)
    joins = (s.call("join", rank, *arguments, result=type(None), deadline_s=60.0) for rank, s in enumerate(pair))
    await asyncio.gather(*joins)
    opens = (s.call("open", str(folder), config.bucket_bytes, result=list[Bucket], deadline_s=LOAD_S) for s in pair)
    buckets, _ = await asyncio.gather(*opens)
    times = []
    for _ in range(PUBLICATIONS):
        started = time.monotonic()
        for index in range(len(buckets)):
            sends = (s.call("broadcast", index, result=type(None), deadline_s=LOAD_S) for s in pair)
            await asyncio.gather(*sends)
        times.append(time.monotonic() - started)
    for sender in pair:
        sender.kill()
    return statistics.median(times[1:])


async def measure_adapter(bench: Bench, model: Path, folder: Path) -> dict[str, float]:
    adapter = make_adapter(model, folder / "lora", seed=1, rank=RANK).folder
    shutil.rmtree(folder / "lora" / "merged")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    sent_bytes = sum(file.stat().st_size for file in adapter.iterdir())
    gaps: list[float] = []
    bystander = asyncio.create_task(_token_gaps(bench.client.url, gaps))
    await _until_tokens(gaps, 20)
    before = max(gaps[2:])
    seen = len(gaps)
    manifests = [WeightsManifest("main", PolicyVersion(1, n), str(adapter), {}, 0, kind="adapter") for n in range(3)]
    publisher = StagedPublisher(Fleet([bench.client], FIRST), AdapterTransport(), PublishConfig(), manifests[0])
    receipts = [receipt for manifest in manifests for receipt in await publisher.publish(manifest)]
    await _until_tokens(gaps, seen + 5)
    bystander.cancel()
    return {
        "gap_s": 0.0,
        "seconds": round(statistics.mean(receipt.seconds for receipt in receipts), 3),
        "lora_extra_bytes_fraction": (sent_bytes - tensor_bytes) / tensor_bytes,
        "lora_token_gap_ratio": max(gaps[seen:]) / before,
    }


async def measure_in_place(bench: Bench) -> tuple[float, float]:
    """Pause of a swap in place, and a decode step, in milliseconds."""
    client = EngineClient("in-place", bench.client.url, ClientConfig(load_s=LOAD_S), "in_place")
    gaps: list[float] = []
    bystander = asyncio.create_task(_token_gaps(client.url, gaps))
    await _until_tokens(gaps, 20)
    step_s = statistics.median(gaps[2:])
    inner = Bench(client, bench._manifests, bench.logs)
    inner._version = PolicyVersion(2, 0)
    manifests = [inner.manifest() for _ in range(PUBLICATIONS)]
    publisher = StagedPublisher(
        Fleet([client], FIRST), DiskTransport(), PublishConfig(pause_mode="in_place"), manifests[0]
    )
    receipts = [receipt for manifest in manifests for receipt in await publisher.publish(manifest)]
    bystander.cancel()
    await client.abort_all()
    await client.close()
    return 1000 * statistics.median(receipt.gap_s for receipt in receipts), 1000 * step_s


@asynccontextmanager
async def _load(url: str) -> AsyncIterator[None]:
    """Two requests that generate, again and again."""
    tasks = [asyncio.create_task(_token_gaps(url, [])) for _ in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _token_gaps(url: str, gaps: list[float]) -> None:
    """Generate for ever and write down the time between two tokens. Waits for: tokens. Unblocked by: cancellation."""
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    async with httpx.AsyncClient(base_url=url, timeout=LOAD_S, trust_env=False) as http:
        while True:
            async with http.stream("POST", "/generate", json=body) as response:
                last = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        gaps += [now - last] if last is not None else []
                        last = now


async def _until_tokens(gaps: list[float], count: int) -> None:
    async with asyncio.timeout(LOAD_S):
        while len(gaps) < count:
            await asyncio.sleep(0.01)


def make_weights(model: Path, folder: Path) -> tuple[WeightsManifest, WeightsManifest]:
    """The model, and a copy in which some values differ."""
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {}
    for name, tensor in weights.items():
        is_changed = torch.rand(tensor.shape, generator=generator) < CHANGED_FRACTION
        changed[name] = torch.where(is_changed, tensor * 1.001, tensor)
    manifests = []
    for name, tensors in (("even", weights), ("odd", changed)):
        shutil.copytree(model, folder / name)
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        manifests.append(WeightsManifest("main", FIRST, str(folder / name), weight_checksums(tensors), num_bytes))
    return manifests[0], manifests[1]


async def measure(model: Path, folder: Path) -> None:
    manifests = make_weights(model, folder)
    launch = EngineLaunch("main", "bench", Path(manifests[0].path), FIRST, EmbeddedEngineConfig(), False, folder)
    engine = await EngineProcess.start(launch, ClientConfig(load_s=LOAD_S), PublishConfig())
    bench = Bench(engine.client, manifests, folder)
    tensors = TensorTransport(TensorTransportConfig(), LOAD_S, True, folder)
    broadcast = BroadcastTransport(BroadcastTransportConfig(), LOAD_S, True, folder)
    delta = DeltaTransport(DeltaTransportConfig(folder=folder / "host"), LOAD_S, folder)
    try:
        transports = [
            await measure_transport(bench, "disk", DiskTransport()),
            await measure_transport(bench, "tensors", tensors),
            await measure_transport(bench, "broadcast", broadcast),
            await measure_transport(bench, "delta", delta),
        ]
        ratio = await measure_broadcast(bench)
        pause_ms, step_ms = await measure_in_place(bench)
        lora = await measure_adapter(bench, model, folder)
    finally:
        with suppress(ProcessLookupError):
            await engine.close()
    transports.append({"transport": "adapter", "gap_s": lora.pop("gap_s"), "seconds": lora.pop("seconds")})
    report(
        "publish_gap",
        transports=transports,
        broadcast_over_gloo=round(ratio, 3),
        **{name: round(value, 4) for name, value in lora.items()},
        in_place_pause_ms=round(pause_ms, 2),
        decode_step_ms=round(step_ms, 2),
        delta_sent_fraction=round(delta.sent_bytes / delta.full_bytes, 4),
        changed_fraction=CHANGED_FRACTION,
        publications=PUBLICATIONS,
        weights_bytes=manifests[0].num_bytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    model = parser.parse_args().model
    if not (model / "model.safetensors").is_file():
        raise SystemExit(f"no model at {model}; make it with `agentrl warmstart environments/sql/smollm2-import.toml`")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(model, Path(folder)))


if __name__ == "__main__":
    main()
