"""What one GPU reaches with trainer and embedded engine: speed, memory, publication and the gap between the two.

A Qwen3 of random weights in the shape of Qwen3-0.6B (``--size base``), or a tiny one. Each part runs in a process of
its own, so that none has the memory of another and one that fails costs no other; the last line has all of them.

Figures: `device`, the GPU, its software, and the bfloat16 operations a second of a large matrix product, measured and
by the vendor's data sheet (dense); `peak_of` says which of the two `mfu` is a fraction of, the data sheet's where it is
known. `trainer_*`, whole steps, from numpy arrays to moved weights (AdamW): `tokens_per_s`, `peak_bytes` of tensors,
`mfu`, the operations (`Shape.step_flops`: 6 N a token and the causal half of attention) over what the peak could
do meanwhile. `engine`: tokens a second of so many requests at once, their short prompts included
(`decode_tokens_per_s`), and of long prompts (`prefill_tokens_per_s`), through HTTP; `bytes`, what the process takes of
the GPU. `publish`: a trainer's weights of `weights_bytes` on their way to an engine beside it on the same GPU, by disk,
through shared memory of the host and through the GPU's (CUDA IPC): `seconds` of a whole publication with receipt and
canary, `gap_s` of the engine's pause; and `gap_max_nats` and `gap_mean_nats` of fresh tokens, both in bfloat16.
On a CPU bytes and `mfu` say nothing and are null.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.inference.client import EngineClient
from agentrl.inference.fleet import Fleet
from agentrl.protocols import WeightTransport
from agentrl.trainer.rank import TrainerRank
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig, TensorTransportConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.tensors import TensorTransport
from tests.benchmarks.report import report
from tests.storms.gpu_workload import (
    BASE,
    FIRST,
    LOAD_S,
    TINY,
    Shape,
    batch_of,
    draw_ids,
    draw_replies,
    guessed_batch,
    make_model,
    peak_bytes,
    reset_peak,
    start_engine,
    synchronize,
    trainer_config,
    trainer_rank,
    trajectory_of,
    used_bytes,
)

Figures = dict[str, Any]
PART_S = 420.0
# Dense bfloat16 operations a second by the vendor's data sheets; the longest name that the device's contains counts.
DATA_SHEETS = {
    "A10G": 70e12, "A100": 312e12, "B200": 2250e12, "GH200": 989e12, "H100": 989e12, "H100 NVL": 835e12,
    "H100 PCIe": 756e12, "H200": 989e12, "H800": 989e12, "L4": 121e12, "L40S": 362e12, "RTX 4090": 165e12,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much is computed; lengths in tokens."""

    shape: Shape
    matrix: int
    step: tuple[int, int]
    long_step: tuple[int, int]
    requests: tuple[int, ...]
    reply: int
    prompts: tuple[int, int]
    timed: int


SIZES = {
    "tiny": Size(TINY, 128, (4, 64), (1, 128), (1, 2), 8, (2, 64), 1),
    "base": Size(BASE, 8192, (32, 1024), (8, 4096), (1, 8, 32, 64), 128, (8, 2048), 3),
}


def measure_device(device: str, size: Size, _folder: Path) -> Figures:
    """What computes here, and how many operations a second a matrix product reaches."""
    is_gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine()
    left, right = (torch.randn(size.matrix, size.matrix, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [_timed(device, lambda: left @ right) for _ in range(3 + 10 * size.timed)][3:]
    return {
        "name": name,
        "bytes": torch.cuda.get_device_properties(device).total_memory if is_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "measured_flops": 2 * size.matrix**3 / statistics.median(times),
        "data_sheet_flops": data_sheet_flops(name) if is_gpu else None,
    }


def data_sheet_flops(name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU of this name, None if it is not in the table."""
    known = [model for model in DATA_SHEETS if model in name]
    return DATA_SHEETS[max(known, key=len)] if known else None


def trainer_part(is_long: bool, **options: Any) -> Callable[[str, Size, Path], Figures]:
    """Steps of a trainer with these options."""

    def measure(device: str, size: Size, folder: Path) -> Figures:
        count, num_tokens = size.long_step if is_long else size.step
        config = trainer_config(device, kind="adamw", rate=1e-6, max_gap_nats=1e9, **options)
        model = make_model(folder / "model", size.shape, device, dtype=torch.bfloat16)
        reset_peak(device)
        with trainer_rank(model, folder / "rank", config) as rank:
            _step(rank, size.shape, count, num_tokens, FIRST)
            reset_peak(device)
            versions = [PolicyVersion(0, 1 + number) for number in range(size.timed)]
            seconds = [_step(rank, size.shape, count, num_tokens, version) for version in versions]
        step_s = statistics.median(seconds)
        return {
            "sequences": count,
            "sequence_tokens": num_tokens,
            "step_s": step_s,
            "tokens_per_s": count * num_tokens / step_s,
            "peak_bytes": peak_bytes(device),
            "model_flops_per_s": size.shape.step_flops([num_tokens] * count) / step_s,
        }

    return measure


def _step(rank: TrainerRank, shape: Shape, count: int, num_tokens: int, version: PolicyVersion) -> float:
    return rank.step(guessed_batch(shape, count, num_tokens, version)).metrics["time/train_step_s"]


def measure_engine(device: str, size: Size, folder: Path) -> Figures:
    """Tokens a second of an embedded engine in bfloat16, by the number of requests at once, and of long prompts."""
    return asyncio.run(_measure_engine(device, size, folder))


async def _measure_engine(device: str, size: Size, folder: Path) -> Figures:
    model = make_model(folder / "model", size.shape, device, dtype=torch.bfloat16)
    reset_peak(device)
    before = used_bytes(device)
    engine = await start_engine(model, folder, device, "bfloat16", max_running_requests=max(size.requests))
    try:
        decode = {str(n): await _decode(engine.client, size, n) for n in size.requests}
        prefill = await _prefill(engine.client, size)
        after = used_bytes(device)
    finally:
        await engine.close()
    return {
        "decode_tokens_per_s": decode,
        "prefill_tokens_per_s": prefill,
        "bytes": None if before is None or after is None else after - before,
    }


async def _decode(client: EngineClient, size: Size, count: int) -> float:
    """Tokens a second of so many requests; the first round, in which kernels are loaded, does not count."""
    times = []
    for number in range(1 + size.timed):
        prompts = draw_ids(size.shape, count, 16, seed=1000 * count + number)
        started = time.monotonic()
        await draw_replies(client, prompts, size.reply)
        times.append(time.monotonic() - started)
    return count * size.reply / statistics.median(times[1:])


async def _prefill(client: EngineClient, size: Size) -> float:
    count, num_tokens = size.prompts
    times = []
    for number in range(1 + size.timed):
        prompts = draw_ids(size.shape, count, num_tokens, seed=number)
        started = time.monotonic()
        await draw_replies(client, prompts, 1)
        times.append(time.monotonic() - started)
    return count * num_tokens / statistics.median(times[1:])


def measure_publish(device: str, size: Size, folder: Path) -> Figures:
    """Trainer and engine beside each other: the gap of fresh tokens, and new weights by each transport."""
    model = make_model(folder / "model", size.shape, device, dtype=torch.bfloat16)
    config = trainer_config(device, "bfloat16", kind="adamw", rate=1e-5, max_gap_nats=100.0)
    with trainer_rank(model, folder / "rank", config) as rank:
        return asyncio.run(_measure_publish(rank, model, device, size, folder))


async def _measure_publish(rank: TrainerRank, model: Path, device: str, size: Size, folder: Path) -> Figures:
    engine = await start_engine(model, folder, device, "bfloat16", max_running_requests=16)
    try:
        prompts = draw_ids(size.shape, 16, 32, seed=11)
        replies = await draw_replies(engine.client, prompts, 2 * size.reply)
        batch = batch_of([trajectory_of(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)])
        metrics = rank.step(batch).metrics
        started = time.monotonic()
        staged = rank.stage(PolicyVersion(0, 1), str(folder / "staged"))
        stage_s = time.monotonic() - started
        first = dataclasses.replace(staged, version=FIRST)
        fleet = Fleet([engine.client], FIRST)
        transports: dict[str, WeightTransport] = {"disk": DiskTransport(), "host": _tensors("cpu", folder)}
        if device.startswith("cuda"):
            transports["device"] = _tensors("cuda:0", folder)
        published = {}
        for number, (name, transport) in enumerate(transports.items()):
            publisher = StagedPublisher(fleet, transport, PublishConfig(max_canary_gap_nats=0.5), first)
            steps = range(1 + 10 * number, 3 + 10 * number + size.timed)
            published[name] = await _publish(publisher, [_as(staged, PolicyVersion(0, step)) for step in steps])
    finally:
        await engine.close()
    return {
        "weights_bytes": staged.num_bytes,
        "stage_s": stage_s,
        "transports": published,
        "gap_max_nats": metrics["trainer/fresh_gap_max_nats"],
        "gap_mean_nats": metrics["trainer/fresh_gap_mean_nats"],
        "fresh_tokens": metrics["trainer/fresh_tokens"],
    }


def _tensors(place: str, folder: Path) -> WeightTransport:
    return TensorTransport(TensorTransportConfig(device=place), LOAD_S, folder)


def _as(manifest: WeightsManifest, version: PolicyVersion) -> WeightsManifest:
    """The weights under another version, as new ones: what is known to be unchanged is renamed and not loaded."""
    return dataclasses.replace(manifest, version=version, unchanged_since=None)


async def _publish(publisher: StagedPublisher, manifests: Sequence[WeightsManifest]) -> Figures:
    """Publish several versions; the first, for which processes start, does not count."""
    try:
        receipts = [receipt for manifest in manifests for receipt in await publisher.publish(manifest)][1:]
    finally:
        await publisher.close()
    return {name: statistics.median(getattr(receipt, name) for receipt in receipts) for name in ("seconds", "gap_s")}


def _timed(device: str, work: Callable[[], object]) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


PARTS: dict[str, Callable[[str, Size, Path], Figures]] = {
    "device": measure_device,
    "trainer_bfloat16": trainer_part(False, dtype="bfloat16"),
    "trainer_checkpointed": trainer_part(False, dtype="bfloat16", activation_checkpointing=True),
    "trainer_long": trainer_part(True, dtype="bfloat16"),
    "engine": measure_engine,
    "publish": measure_publish,
}


def add_mfu(found: dict[str, Figures]) -> dict[str, Figures]:
    """Give each trainer its share of the peak, where a GPU's is known."""
    device = found.get("device", {})
    sheet, measured = device.get("data_sheet_flops"), device.get("measured_flops")
    if device.get("bytes") is None:
        return {name: part | {"mfu": None} if "model_flops_per_s" in part else part for name, part in found.items()}
    peak = {"peak_of": "data sheet" if sheet else "measured matrix product"}
    return {
        name: part | {"mfu": part["model_flops_per_s"] / (sheet or measured)} | peak
        if "model_flops_per_s" in part
        else part
        for name, part in found.items()
    }


def run_part(name: str, device: str, size: str) -> Figures:
    """A part's figures, from a process of its own, or what it died of."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--device", device, "--size", size, "--part", name]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=PART_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {PART_S:g} s"}
    with suppress(IndexError, ValueError):
        if told.returncode == 0:
            return json.loads(told.stdout.splitlines()[-1])
    return {"error": f"exit code {told.returncode}: {(told.stderr or told.stdout)[-2000:]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--part", choices=PARTS)
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device here; --device cpu --size tiny shows that it runs")
    torch.set_num_threads(1)
    if given.part:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(PARTS[given.part](given.device, SIZES[given.size], Path(folder))))
        return
    found: dict[str, Figures] = {}
    for name in PARTS:
        started = time.monotonic()
        found[name] = run_part(name, given.device, given.size)
        print(f"{name}: {time.monotonic() - started:.0f} s  {json.dumps(found[name])}", file=sys.stderr, flush=True)
    shape = dataclasses.asdict(SIZES[given.size].shape)
    report("gpu", size=given.size, shape=shape, **add_mfu(found))
    if any("error" in part for part in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
