"""How other requests feel that a LoRA adapter loads, and what its bytes cost them in a process of its own."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from safetensors.torch import load_file

from agentrl.inference.client import EngineClient
from agentrl.inference.fleet import Fleet
from agentrl.process.ports import free_port
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import AdapterTransport
from agentrl.weights.config import PublishConfig
from agentrl.weights.publisher import StagedPublisher
from tests.benchmarks.publish_load import FIRST, LOAD_S, gap_ratio, gap_ratio_interval, token_gaps, until_tokens
from tests.integration.lora_adapters import make_adapter

RANK = 16
FIRST_LOADS = 2
LOADS = 60
_UP_S = 60.0


class Elsewhere:
    """A server that reads the file of an adapter into memory when it is told to, and serves nothing with it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    @classmethod
    @asynccontextmanager
    async def running(cls, file: Path) -> AsyncIterator[Elsewhere]:
        """The server, for the length of the block."""
        port = free_port()
        command = [sys.executable, "-m", "tests.benchmarks.copying_server", str(file), str(port)]
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LOAD_S, trust_env=False) as http:
                await _until_up(http)
                yield cls(http)
        finally:
            process.kill()
            await process.wait()

    async def copy(self) -> None:
        """As many calls as an adapter's publication makes, of which one moves its bytes."""
        for path in ("/load", "/unload"):
            (await self._http.post(path, json={"lora_name": "adapter", "lora_path": "elsewhere"})).raise_for_status()


async def measure_adapter(client: EngineClient, model: Path, folder: Path) -> dict[str, float]:
    """A bystander's gaps between two tokens while adapters load, against as many behind each load, and as many again.

    The first loads, which make room for adapters, do not count.
    """
    adapter = make_adapter(model, folder / "lora", seed=1, rank=RANK).folder
    shutil.rmtree(folder / "lora" / "merged")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    sent_bytes = sum(file.stat().st_size for file in adapter.iterdir())
    versions = [PolicyVersion(1, number) for number in range(FIRST_LOADS + LOADS)]
    manifests = [WeightsManifest("main", version, str(adapter), {}, 0, kind="adapter") for version in versions]
    publisher = StagedPublisher(Fleet([client], FIRST), AdapterTransport(), PublishConfig(), manifests[0])
    gaps: list[float] = []
    bystander = asyncio.create_task(token_gaps(client.url, gaps))
    receipts, windows = [], []
    async with Elsewhere.running(adapter / "adapter_model.safetensors") as elsewhere:
        await until_tokens(gaps, 10)
        for manifest in manifests:
            seen = len(gaps)
            receipts += await publisher.publish(manifest)
            await until_tokens(gaps, len(gaps) + 1)
            length = len(gaps) - seen
            await until_tokens(gaps, seen + 3 * length)
            await elsewhere.copy()
            await until_tokens(gaps, seen + 4 * length)
            windows.append([gaps[seen + part * length : seen + (part + 1) * length] for part in range(4)])
            await until_tokens(gaps, len(gaps) + 1)
    bystander.cancel()
    await publisher.close()
    during, behind, later, copying = zip(*windows[FIRST_LOADS:], strict=True)
    low, high = gap_ratio_interval(during, behind)
    low_elsewhere, high_elsewhere = gap_ratio_interval(copying, behind)
    return {
        "gap_s": statistics.mean(receipt.gap_s for receipt in receipts),
        "seconds": round(statistics.mean(receipt.seconds for receipt in receipts[FIRST_LOADS:]), 3),
        "lora_extra_bytes_fraction": (sent_bytes - tensor_bytes) / tensor_bytes,
        "lora_token_gap_ratio": gap_ratio(during, behind),
        "lora_token_gap_low": low,
        "lora_token_gap_high": high,
        "lora_token_gap_elsewhere": gap_ratio(copying, behind),
        "lora_token_gap_elsewhere_low": low_elsewhere,
        "lora_token_gap_elsewhere_high": high_elsewhere,
        "lora_token_gap_control": gap_ratio(later, behind),
        "lora_first_gap_ratio": gap_ratio(*list(zip(*windows[:FIRST_LOADS], strict=True))[:2]),
        "token_gap_ms": 1000 * statistics.mean(gap for window in behind for gap in window),
        "lora_loads": LOADS,
    }


async def _until_up(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(_UP_S):
        while True:
            try:
                await http.post("/unload", json={})
                return
            except httpx.TransportError:
                await asyncio.sleep(0.1)
