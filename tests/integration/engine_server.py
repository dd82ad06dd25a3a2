"""A running engine as the conformance tests see it: a base URL, and the model that it serves."""

from __future__ import annotations

import asyncio
import base64
import itertools
import pickle
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import torch
from running_request import ENDLESS, RunningRequest
from safetensors.torch import load_file, save_file
from server_traits import EMBEDDED, ServerTraits
from transformers import AutoModelForCausalLM, DynamicCache

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.inference.transport import KEEP_ALIVE_S
from agentrl.process.ports import free_port
from agentrl.testing.tiny_moe import TOP_K
from agentrl.types.weights import PauseMode
from tests.servers.process import running_server

FIRST_VERSION = "0.0"
_START_S = 240.0
_DEADLINE_S = 240.0
_ROUTING_KEYS = ("return_routed_experts", "routed_experts_start_len")
_rid_numbers = itertools.count()


@dataclass(frozen=True)
class EngineServer:
    """Where an engine answers, and what it serves when a test begins."""

    url: str
    model: Path
    other_model: Path
    traits: ServerTraits = EMBEDDED
    token: str | None = None

    @property
    def is_embedded(self) -> bool:
        return self.traits is EMBEDDED

    def client(self, pause_mode: PauseMode = PauseMode.ABORT, **limits: float) -> EngineClient:
        return EngineClient("engine", self.url, ClientConfig(**limits), pause_mode, self.token)


class EngineCalls:
    """The native protocol, one method per call, without any client of ours in between."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        headers = {"authorization": f"Bearer {server.token}"} if server.token else {}
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        self.http = httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=_DEADLINE_S, trust_env=False, limits=limits
        )

    @classmethod
    @asynccontextmanager
    async def of(cls, server: EngineServer) -> AsyncIterator[EngineCalls]:
        """Calls to a server that is as it was when they end."""
        calls = cls(server)
        yield calls
        await calls.restore()
        await calls.http.aclose()

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def ok(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json() if response.content else {}

    async def refused(self, path: str, **body: Any) -> str:
        response = await self.post(path, **body)
        assert response.status_code == 400, response.text
        answer = response.json()
        error = answer.get("error", answer)
        return error["message"] if isinstance(error, dict) else error

    async def generate(self, ids: list[int], rid: str | None = None, **more: Any) -> dict[str, Any]:
        return await self.ok("/generate", **generate_body(ids, rid, **more))

    def start(self, ids: list[int], rid: str | None = None, **more: Any) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.generate(ids, rid, **more))

    async def stream(self, ids: list[int], rid: str | None = None, **more: Any) -> AsyncIterator[Any]:
        """Events of a streamed generation; the last is ``[DONE]``."""
        body = generate_body(ids, rid, **more) | {"stream": True}
        async with self.http.stream("POST", "/generate", json=body) as response:
            async for line in _lines(response):
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ")
                    yield "[DONE]" if data == b"[DONE]" else orjson.loads(data)

    async def start_running(self, ids: list[int], rid: str | None = None, **more: Any) -> RunningRequest:
        """A request that has its first token already, and goes on until it is aborted if `more` sets no limit."""
        rid = rid or f"running-{next(_rid_numbers):08d}"
        events = self.stream(ids, rid, **(ENDLESS | more))
        request = RunningRequest(events, lambda: self.post("/abort_request", rid=rid))
        await request.until(1)
        return request

    async def info(self) -> dict[str, Any]:
        return (await self.http.get("/model_info")).json()

    async def checksums(self) -> dict[str, str]:
        """Digests of what is served, in whatever form the server gives them."""
        answer = await self.ok("/weights_checker", action="checksum")
        return answer["ranks"][0]["checksums"] if self.server.traits.lists_checksums_by_rank else answer["checksums"]

    async def wait_for(self, running: int | None = None, waiting: int | None = None) -> None:
        """Until so many requests run and wait."""
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                num_running, num_waiting = await self.count()
                if running in (None, num_running) and waiting in (None, num_waiting):
                    return
                await asyncio.sleep(0.002)

    async def count(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        if self.server.is_embedded:
            info = await self.info()
            return info["num_running"], info["num_waiting"]
        (load,) = (await self.http.get("/v1/loads")).json()["loads"]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    async def restore(self) -> None:
        """Bring the engine back to its first weights, idle and not paused, whatever a test did."""
        await self.post("/abort_request", abort_all=True)
        await self.post("/continue_generation")
        await self.post("/end_weight_update")
        if (await self.info())["weight_version"] != FIRST_VERSION:
            await self.load(self.server.model, FIRST_VERSION)

    async def flush(self) -> None:
        """Empty the cache, once nothing runs: an answer comes a moment before the engine has done with its request."""
        async with asyncio.timeout(_DEADLINE_S):
            while (await self.post("/flush_cache")).status_code != 200:
                await asyncio.sleep(0.002)

    async def load(self, folder: Path, version: str, **more: Any) -> dict[str, Any]:
        body = {"model_path": str(folder), "weight_version": version, "abort_all_requests": False} | more
        return await self.ok("/update_weights_from_disk", **body)


def generate_body(ids: list[int], rid: str | None = None, **more: Any) -> dict[str, Any]:
    """Top-level keys by their names; everything else goes to ``sampling_params``."""
    top_level = ("logprob_start_len", "return_sampling_mask", "sampling_logprobs_mode", *_ROUTING_KEYS, "lora_path")
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
        return (self._network(model)(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    @torch.no_grad()
    def switched(self, parts: Sequence[tuple[Path, int]], ids: list[int]) -> torch.Tensor:
        """Log-probabilities [T, V] where each of `parts` forwards up to its end and reads the KV of those before it.

        Example: ``[(old, 9), (new, 20)]`` forwards 9 tokens by the old weights and 11 by the new.
        """
        cache, start, rows = DynamicCache(), 0, []
        for model, end in parts:
            if end > start:
                network = self._network(model)
                logits = network(torch.tensor([ids[start:end]]), past_key_values=cache, use_cache=True).logits[0]
                rows.append(logits.log_softmax(-1))
                start = end
        return torch.cat(rows)

    def logprobs(self, model: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
        """Of tokens 1 to n-1."""
        table = self.distributions(model, ids, temperature)[:-1]
        return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    @torch.no_grad()
    def experts(self, model: Path, ids: list[int]) -> np.ndarray:
        """What a mixture of experts chooses for every position, [T, layers, top_k], by descending probability."""
        layers = self._network(model)(torch.tensor([ids]), output_router_logits=True).router_logits
        return np.stack([logits.topk(TOP_K).indices.numpy() for logits in layers], axis=1)

    def _network(self, model: Path) -> Any:
        if model not in self._networks:
            self._networks[model] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        return self._networks[model]

    def sampled(self, model: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
        """Of the tokens of `output` behind `prompt`."""
        return self.logprobs(model, prompt + output, temperature)[len(prompt) - 1 :]


@contextmanager
def running_engine(model: Path, log: Path, *options: str, port: int | None = None) -> Iterator[str]:
    """An embedded engine process, which is killed when the block ends; gives its base URL."""
    port = port or free_port()
    command = [sys.executable, "-m", "agentrl.cli.main", "engine", str(model), "--port", str(port)]
    with running_server([*command, "--weight-version", FIRST_VERSION, *options], port, log, _START_S) as url:
        yield url


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines as they end on the wire; httpx's own end at every Unicode line break, and drawn text is full of these."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
