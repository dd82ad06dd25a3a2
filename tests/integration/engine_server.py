"""A running engine as the conformance tests see it: a base URL, and the model that it serves."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig

FIRST_VERSION = "0.0"
_START_S = 90.0
_ROUTING_KEYS = ("return_routed_experts", "routed_experts_start_len")
_rid_numbers = itertools.count()


@dataclass(frozen=True)
class EngineServer:
    """Where an engine answers, and what it serves when a test begins."""

    url: str
    model: Path
    other_model: Path
    is_embedded: bool = True
    token: str | None = None

    def client(self, pause_mode: Any = "abort", **limits: float) -> EngineClient:
        return EngineClient("engine", self.url, ClientConfig(**limits), pause_mode, self.token)


class EngineCalls:
    """The native protocol, one method per call, without any client of ours in between."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        headers = {"authorization": f"Bearer {server.token}"} if server.token else {}
        self.http = httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60.0, trust_env=False)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def ok(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json() if response.content else {}

    async def refused(self, path: str, **body: Any) -> str:
        response = await self.post(path, **body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return error["message"] if isinstance(error, dict) else error

    async def generate(self, ids: list[int], rid: str | None = None, **more: Any) -> dict[str, Any]:
        return await self.ok("/generate", **generate_body(ids, rid, **more))

    def start(self, ids: list[int], rid: str | None = None, **more: Any) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.generate(ids, rid, **more))

    async def stream(self, ids: list[int], rid: str | None = None, **more: Any) -> AsyncIterator[Any]:
        """Events of a streamed generation; the last is ``[DONE]``."""
        body = generate_body(ids, rid, **more) | {"stream": True}
        async with self.http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else orjson.loads(data)

    async def start_running(self, ids: list[int], rid: str | None = None, **more: Any) -> asyncio.Task[dict[str, Any]]:
        """A request that has its first token already; the task gives its whole answer."""
        has_begun = asyncio.Event()

        async def follow() -> dict[str, Any]:
            last: dict[str, Any] = {}
            async for event in self.stream(ids, rid, **more):
                last = last if event == "[DONE]" else event
                has_begun.set()
            return last

        task = asyncio.create_task(follow())
        async with asyncio.timeout(20):
            await has_begun.wait()
        return task

    async def info(self) -> dict[str, Any]:
        return (await self.http.get("/model_info")).json()

    async def wait_for(self, running: int | None = None, waiting: int | None = None) -> None:
        """Until so many requests run and wait; only the embedded engine tells, another gets time."""
        if not self.server.is_embedded:
            await asyncio.sleep(0.3)
            return
        async with asyncio.timeout(20):
            while True:
                info = await self.info()
                if running in (None, info["num_running"]) and waiting in (None, info["num_waiting"]):
                    return
                await asyncio.sleep(0.002)

    async def restore(self) -> None:
        """Bring the engine back to its first weights, idle and not paused, whatever a test did."""
        await self.post("/abort_request", abort_all=True)
        await self.post("/continue_generation")
        await self.post("/end_weight_update")
        if (await self.info())["weight_version"] != FIRST_VERSION:
            await self.load(self.server.model, FIRST_VERSION)

    async def load(self, folder: Path, version: str, **more: Any) -> dict[str, Any]:
        body = {"model_path": str(folder), "weight_version": version, "abort_all_requests": False} | more
        return await self.ok("/update_weights_from_disk", **body)


def generate_body(ids: list[int], rid: str | None = None, **more: Any) -> dict[str, Any]:
    """Top-level keys by their names; everything else goes to ``sampling_params``."""
    top_level = ("logprob_start_len", "return_sampling_mask", *_ROUTING_KEYS, "lora_path")
    body = {key: more.pop(key) for key in top_level if key in more}
    rid = rid or f"rid-{next(_rid_numbers):08d}"
    return body | {"input_ids": ids, "rid": rid, "return_logprob": True, "sampling_params": more}


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def spans_of(answer: dict[str, Any], key: str = "weight_versions") -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"][key]]


def finish_of(answer: dict[str, Any]) -> str:
    return answer["meta_info"]["finish_reason"]["type"]


def pickled(pairs: Any) -> str:
    return base64.b64encode(pickle.dumps(pairs)).decode()


def copy_model(source: Path, target: Path, seed: int) -> Path:
    """The same model with other weights."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    changed = {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    save_file(changed, target / "model.safetensors", {"format": "pt"})
    return target


class Reference:
    """Plain Hugging Face forward passes of a model folder, in float32."""

    def __init__(self) -> None:
        self._networks: dict[Path, Any] = {}

    @torch.no_grad()
    def distributions(self, model: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-probabilities [T, V] of the token after each of `ids`."""
        if model not in self._networks:
            self._networks[model] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        return (self._networks[model](torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    def logprobs(self, model: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
        """Of tokens 1 to n-1."""
        table = self.distributions(model, ids, temperature)[:-1]
        return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def sampled(self, model: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        """Of the tokens of `output` behind `prompt`."""
        return self.logprobs(model, prompt + output, temperature)[len(prompt) - 1 :]


@contextmanager
def running_engine(model: Path, log: Path, *options: str) -> Iterator[str]:
    """An embedded engine process; gives its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "agentrl.cli.main", "engine", str(model), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--weight-version", FIRST_VERSION, *options],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log)
        yield url
        assert process.poll() is None, f"the engine died:\n{log.read_text()}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            httpx.get(f"{url}/health", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"no answer within {_START_S} s:\n{log.read_text()}")
