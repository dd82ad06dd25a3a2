"""What `publish_gap` publishes, and the requests that feel it."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agentrl.trainer.streaming import weight_checksums
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion

FIRST = PolicyVersion(0, 0)
LOAD_S = 120.0
CHANGED_FRACTION = 0.02
PROMPT = list(range(100, 140))


@asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Two requests that generate, again and again."""
    tasks = [asyncio.create_task(token_gaps(url, [])) for _ in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def no_load(url: str) -> AsyncIterator[None]:
    """An idle engine."""
    yield


async def token_gaps(url: str, gaps: list[float]) -> None:
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


async def until_tokens(gaps: list[float], count: int) -> None:
    async with asyncio.timeout(LOAD_S):
        while len(gaps) < count:
            await asyncio.sleep(0.01)


Windows = Sequence[Sequence[float]]


def gap_ratio(during: Windows, alone: Windows) -> float:
    """The mean gap in some windows over that in others."""
    return statistics.mean(itertools.chain(*during)) / statistics.mean(itertools.chain(*alone))


def gap_ratio_interval(during: Windows, alone: Windows) -> tuple[float, float]:
    """The 95 % interval of `gap_ratio`, bootstrapped over pairs of windows of equal lengths."""
    sums = np.array([[sum(window), sum(other)] for window, other in zip(during, alone, strict=True)])
    drawn = np.random.default_rng(0).integers(len(sums), size=(10_000, len(sums)))
    totals = sums[drawn].sum(axis=1)
    low, high = np.quantile(totals[:, 0] / totals[:, 1], (0.025, 0.975))
    return float(low), float(high)


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
