"""Speaks SGLang's native HTTP protocol; the only module that knows an HTTP library."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import httpx
import orjson

from agentrl.inference.adapters import Adapter, AdapterShelf, adapter_name, is_adapter_name
from agentrl.inference.checksum import checksum_key
from agentrl.inference.config import ClientConfig
from agentrl.inference.transport import LaneTransport, decoded, error_text
from agentrl.inference.wire import generation_body, parse_checksums, parse_generation
from agentrl.types.batch import Receipt
from agentrl.types.errors import Boundary, EngineError, EngineRefusedError, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.version import PolicyVersion, VersionSpan

PauseMode = Literal["abort", "retract", "in_place"]


class EngineClient:
    """An engine behind HTTP, embedded or SGLang.

    Generation failures are `EpisodeError`: they end one episode. Failures of control calls are
    `EngineError`: the publisher decides what becomes of the engine.

    Example: ``EngineClient("main-0", "http://127.0.0.1:30000", ClientConfig())``.
    """

    def __init__(
        self, name: str, url: str, config: ClientConfig, pause_mode: PauseMode = "abort", token: str | None = None
    ) -> None:
        self.name, self.url = name, url
        self._config = config
        self._pause_mode = pause_mode
        self._shelf = AdapterShelf()
        self._listed: dict[str, Any] | None = None
        self._unloading: set[asyncio.Task[None]] = set()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={**headers, "content-type": "application/json"},
            transport=LaneTransport(),
            timeout=httpx.Timeout(None, connect=config.connect_s),
            trust_env=False,
        )

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue a prompt.

        Waits for: the engine, however long it is paused. Unblocked by: its reply, an abort, the deadline.

        Raises:
            EpisodeError: engine unreachable, request refused, or an answer that breaks the protocol.
        """
        adapter = self._shelf.begin()
        try:
            answer = await self._generate(request, adapter)
            generation = parse_generation(answer, request, keeps_kv=self._pause_mode == "in_place")
        finally:
            self._release(adapter)
        if adapter is not None:
            spans = (VersionSpan(adapter.version, 0, len(generation.token_ids)),) if len(generation.token_ids) else ()
            return replace(generation, versions=spans, kv_versions=spans)
        return generation

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens 1 to n-1 at temperature 1. Raises EngineError."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        adapter = self._shelf.begin()
        if adapter is not None:
            body["lora_path"] = adapter.name
        try:
            answer = await self._control("/generate", body, self._config.load_s)
        finally:
            self._release(adapter)
        try:
            return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"engine {self.name}: /generate scored what is no number: {error}") from error

    async def pause(self) -> int:
        """Stop generating in the configured mode; returns how many requests that interrupted."""
        answer = await self._control("/pause_generation", {"mode": self._pause_mode}, self._config.control_s)
        return int(answer.get("num_paused_requests", 0))

    async def resume(self) -> None:
        """Generate again. Raises EngineError."""
        await self._control("/continue_generation", {}, self._config.control_s)

    async def abort_all(self) -> None:
        """Give back everything in flight, queued or paused. Raises EngineError."""
        await self._control("/abort_request", {"abort_all": True}, self._config.control_s)

    async def update_weights_from_disk(self, path: str, version: PolicyVersion) -> None:
        """Take the weights in a folder; flushes the KV cache unless requests are frozen in place."""
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": self._pause_mode != "in_place",
            "abort_all_requests": False,
        }
        await self._control("/update_weights_from_disk", body, self._config.load_s)

    async def load_adapter(self, path: str, version: PolicyVersion) -> None:
        """Take a LoRA adapter from a folder; later generations use it, earlier ones keep theirs.

        Safe to repeat: if it refuses, it is asked what it holds, since it may have loaded the adapter though its answer
        was lost, have started again without it, or hold adapters of a run before this one, which go.

        Raises:
            EngineError: the engine cannot be reached, or refuses the adapter.
        """
        adapter = Adapter(adapter_name(version), version)
        if self._shelf.newest is None:
            for name in filter(is_adapter_name, (await self._adapter_sources()).keys() - {adapter.name}):
                self._unload_later(name)
        body, self._listed = {"lora_name": adapter.name, "lora_path": path}, None
        try:
            answer = await self.update("/load_lora_adapter", body)
        except EngineRefusedError:
            held = (await self._adapter_sources()).get(adapter.name)
            if held is None:
                raise
            answer = {}
            if held != path:
                await self.update("/unload_lora_adapter", {"lora_name": adapter.name})
                answer = await self.update("/load_lora_adapter", body)
        self._listed = answer.get("loaded_adapters")
        if (old := self._shelf.put(adapter)) is not None:
            self._unload_later(old.name)

    async def control(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Any other control call. Raises EngineError."""
        return await self._control(path, body, self._config.control_s)

    async def update(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A control call that moves weights. Raises EngineError."""
        return await self._control(path, body, self._config.load_s)

    async def ping(self) -> None:
        """Whether its process answers, paused or not. Raises EngineError."""
        await self.model_info()

    async def probe(self) -> PolicyVersion:
        """Whether it is well, and the version that it serves; not while paused.

        An engine that started again has lost its adapters, and serves its base weights.

        Raises:
            EngineError: it is not well, or what it serves cannot be told.
        """
        response = await self._get("/health")
        if response.status_code != 200:
            raise EngineError(f"engine {self.name}: /health: {error_text(response)}")
        while (adapter := self._shelf.newest) is not None:
            if adapter.name in await self._adapter_sources():
                return adapter.version
            if adapter == self._shelf.newest:  # else a newer one took its place meanwhile
                break
        version = self._base_version(await self.model_info())
        # A run that was resumed labels the base weights with the version of its first adapter.
        if adapter is not None and version == adapter.version:
            raise self._lacks(adapter)
        return version

    async def relabel(self, version: PolicyVersion) -> None:
        """Rename the weights that are served, without touching requests in flight. Raises EngineError."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body, self._config.control_s)

    async def receipt(self) -> Receipt:
        """Version and checksums from the engine itself; of an adapter what it listed as it had loaded it.

        Raises:
            EngineError: the engine does not answer, or lacks the adapter.
        """
        start = time.monotonic()
        if (adapter := self._shelf.newest) is not None:
            listed, self._listed = self._listed, None  # good for one receipt: later ones are about what it holds then
            if adapter.name not in (await self._adapter_sources() if listed is None else listed):
                raise self._lacks(adapter)
            return Receipt(self.name, adapter.version, {}, time.monotonic() - start, 0)
        info = await self.model_info()
        answer = await self._control("/weights_checker", {"action": "checksum"}, self._config.load_s)
        checksums = {checksum_key(info.get("dtype"), name): digest for name, digest in parse_checksums(answer)}
        return Receipt(self.name, self._base_version(info), checksums, time.monotonic() - start, 0)

    async def model_info(self) -> dict[str, Any]:
        """What the engine says of itself; answers in any state. Raises EngineError."""
        return self._checked("/model_info", await self._get("/model_info"))

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        for task in list(self._unloading):
            task.cancel()
        await self._http.aclose()

    async def _generate(self, request: GenerationRequest, adapter: Adapter | None) -> Any:
        cache_name = str(request.expects) if self._pause_mode == "in_place" and request.expects else None
        body = generation_body(request, cache_name, adapter.name if adapter else None)
        try:
            response = await self._post("/generate", body, self._config.generate_s)
        except asyncio.CancelledError:
            await self._abort_quietly(request.rid)
            raise
        except TimeoutError:
            await self._abort_quietly(request.rid)
            message = f"{self.name} gave no reply within {self._config.generate_s:g} s"
            raise EpisodeError(Boundary.TIMEOUT, "engine.generate", message) from None
        except httpx.HTTPError as error:
            message = f"{self.name} at {self.url}: {type(error).__name__} {error}".rstrip()
            raise EpisodeError(Boundary.ENGINE, "unreachable", message) from error
        if response.status_code != 200:
            raise EpisodeError(Boundary.ENGINE, "refused", f"{self.name}: {error_text(response)}")
        return decoded(response)

    def _base_version(self, info: dict[str, Any]) -> PolicyVersion:
        """What `/model_info` calls the weights below any adapter. Raises EngineError."""
        try:
            return PolicyVersion.parse(info["weight_version"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"engine {self.name}: /model_info names no policy version: {error}") from error

    def _lacks(self, adapter: Adapter) -> EngineError:
        return EngineError(f"engine {self.name} does not list {adapter.name} among its models")

    async def _adapter_sources(self) -> dict[str, str | None]:
        """Folders of the adapters that the engine holds, by name; None where it names none."""
        models = self._checked("/v1/models", await self._get("/v1/models")).get("data", [])
        return {model.get("id"): model.get("root") for model in models}

    def _release(self, adapter: Adapter | None) -> None:
        """A call that used an adapter is over."""
        if adapter is not None and self._shelf.end(adapter):
            self._unload_later(adapter.name)

    def _unload_later(self, name: str) -> None:
        """Unload in the background: nobody waits for it, and the engine holds it back while it is used."""

        async def unload() -> None:
            with contextlib.suppress(EngineError):
                await self.update("/unload_lora_adapter", {"lora_name": name})

        task = asyncio.create_task(unload(), name=f"unload-{name}")
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _get(self, path: str) -> httpx.Response:
        try:
            self._check_open()
            async with asyncio.timeout(self._config.control_s):
                return await self._http.get(path)
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineError(f"engine {self.name} at {self.url} does not answer: {type(error).__name__}") from error

    async def _control(self, path: str, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        try:
            response = await self._post(path, orjson.dumps(body), deadline_s)
        except TimeoutError:
            raise EngineError(f"engine {self.name}: {path} took longer than {deadline_s:g} s") from None
        except httpx.HTTPError as error:
            message = f"engine {self.name} at {self.url}: {path}: {type(error).__name__} {error}"
            raise EngineError(message.rstrip()) from error
        return self._checked(path, response)

    def _checked(self, path: str, response: httpx.Response) -> dict[str, Any]:
        if response.status_code != 200:
            raise EngineRefusedError(f"engine {self.name}: {path}: {error_text(response)}", response.status_code)
        answer = decoded(response) if response.content else {}
        if not isinstance(answer, dict):
            raise EngineError(f"engine {self.name}: {path}: no JSON object but {response.text[:300]}")
        return answer

    async def _post(self, path: str, body: bytes, deadline_s: float) -> httpx.Response:
        self._check_open()
        async with asyncio.timeout(deadline_s):
            return await self._http.post(path, content=body)

    def _check_open(self) -> None:
        """An engine that was replaced has a closed client: to who still holds it, it is unreachable."""
        if self._http.is_closed:
            raise httpx.ConnectError("the connection was closed because the engine ended")

    async def _abort_quietly(self, rid: str) -> None:
        """Tell the engine that nobody waits; the answer does not matter, nor does it if it is gone."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            await self._post("/abort_request", orjson.dumps({"rid": rid}), self._config.control_s)
