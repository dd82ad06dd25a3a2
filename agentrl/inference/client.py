"""Speaks SGLang's native HTTP protocol."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import orjson

from agentrl.inference.adapters import Adapter, AdapterShelf, adapter_name, is_adapter_name
from agentrl.inference.calls import GATEWAY_STATUSES, EngineHttp, LostAnswerError, generation_failure
from agentrl.inference.checksum import checksum_key
from agentrl.inference.config import ClientConfig
from agentrl.inference.identity import mismatch
from agentrl.inference.labels import Labels
from agentrl.inference.transport import NoAnswerError, decoded, error_text
from agentrl.inference.weights import WeightCalls
from agentrl.inference.wire import (
    generation_body,
    parse_checksums,
    parse_generation,
    parse_num_requests,
    parse_scores,
    score_body,
)
from agentrl.types.batch import Receipt
from agentrl.types.errors import Boundary, EngineError, EngineRefusedError, EngineRestartedError, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.types.weights import PauseMode, WeightGroup, WeightSource

_TELL_S = 1.0
_SCORE_PAUSES_S = (0.1, 1.0)


class EngineClient:
    """An engine behind HTTP, embedded or SGLang.

    Generation failures are `EpisodeError`: they end one episode. Failures of control calls are
    `EngineError`: the publisher decides what becomes of the engine. A call that may come twice without harm
    (pause, resume, abort, what only looks) is sent again where its answer is lost; `repeated_calls` counts these.
    Versions leave with the run's `mark` and come back without it; another run's mark, in whatever answer, is an
    `EngineTakenError`, which ends the run.

    Example: ``EngineClient("main-0", "http://127.0.0.1:30000", ClientConfig())``.
    """

    def __init__(
        self,
        name: str,
        url: str,
        config: ClientConfig,
        pause_mode: PauseMode = PauseMode.ABORT,
        token: str | None = None,
        mark: str | None = None,
    ) -> None:
        self.name, self.url, self.labels = name, url, Labels(name, url, mark)
        self._config = config
        self._pause_mode = pause_mode
        self._shelf = AdapterShelf()
        self._listed: dict[str, Any] | None = None
        self._unloading: set[asyncio.Task[None]] = set()
        self._may_be_paused = False
        self._http = EngineHttp(name, url, config, token)
        self._weights = WeightCalls(self._http, self.labels, config, pause_mode)

    @property
    def repeated_calls(self) -> Counter[str]:
        """Control calls that were sent again, by path."""
        return self._http.repeated

    @property
    def may_be_paused(self) -> bool:
        """Whether a pause of this client's was sent, and no resume was answered since."""
        return self._may_be_paused

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue a prompt.

        Waits for: the engine, however long it is paused. Unblocked by: its reply, an abort, the deadline.

        Raises:
            EpisodeError: engine unreachable, request refused, or an answer that breaks the protocol.
        """
        adapter = self._shelf.begin()
        try:
            generation = await self._generate(request, adapter)
        finally:
            self._release(adapter)
        if adapter is not None:
            spans = (VersionSpan(adapter.version, 0, len(generation.token_ids)),) if len(generation.token_ids) else ()
            return replace(generation, versions=spans, kv_versions=spans)
        return generation

    async def score(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        """Log-probabilities of tokens `start` to n-1 at temperature 1.

        Raises:
            EngineError: no answer, none that is a score, or three times one of other tokens.
        """
        adapter = self._shelf.begin()
        try:
            return await self._score_again(token_ids, start, adapter)
        finally:
            self._release(adapter)

    async def pause(self) -> int:
        """Stop generating in the configured mode; returns how many requests that interrupted."""
        if self.labels.mark is not None:
            await self.ping()  # of another run no request is to be interrupted
        body = {"mode": self._pause_mode.of_server.value}
        self._may_be_paused = True
        answer = await self._http.repeat("/pause_generation", body, self._config.control_s)
        return int(answer.get("num_paused_requests", 0))

    async def count_requests(self) -> int | None:
        """Requests that the engine runs or queues, of whomever; None if it does not say. Raises EngineError."""
        if (number := parse_num_requests(await self.model_info())) is not None:
            return number
        try:
            return parse_num_requests(await self.read("/v1/loads"))
        except EngineRefusedError:
            return None

    async def resume(self) -> None:
        """Generate again. Raises EngineError."""
        await self._http.repeat("/continue_generation", {}, self._config.control_s)
        self._may_be_paused = False

    async def release_memory(self) -> None:
        """Give back the memory of the KV cache. Raises EngineError, EngineRefusedError if it certainly did not."""
        # Once: a server that has given it back fails at a second call.
        await self._http.control("/release_memory_occupation", {"tags": ["kv_cache"]}, self._config.control_s)

    async def resume_memory(self) -> None:
        """Take that memory again. Raises EngineError."""
        await self._http.control("/resume_memory_occupation", {"tags": ["kv_cache"]}, self._config.control_s)

    async def abort_all(self) -> None:
        """Give back everything in flight, queued or paused. Raises EngineError."""
        await self._http.repeat("/abort_request", {"abort_all": True}, self._config.control_s)

    async def abort(self, rid: str) -> None:
        """Give back what is in flight under an id; none is no error. Raises EngineError."""
        await self._http.control("/abort_request", {"rid": rid}, self._config.control_s)

    async def flush(self) -> bool:
        """Forget the KV of requests that have ended; False if the server does not, since others are under way."""
        try:
            response = await self._http.post("/flush_cache", b"{}", self._config.control_s)
        except (NoAnswerError, TimeoutError):
            return False
        return response.status == HTTPStatus.OK  # SGLang answers in plain text

    async def stage(self, source: WeightSource, version: PolicyVersion) -> None:
        """Take new weights as far as the server can while it generates. Raises EngineError."""
        await self._weights.stage(source, version)

    async def needs_pause(self) -> bool:
        """Whether it must be paused for the swap of what was staged last."""
        return self._weights.needs_pause

    async def swap(self, source: WeightSource, version: PolicyVersion) -> None:
        """Serve new weights; flushes the KV cache unless requests are frozen in place. Raises EngineError."""
        await self._weights.swap(source, version)

    async def join_group(self, group: WeightGroup) -> None:
        """Join a group for broadcasts of weights. Raises EngineError."""
        await self._weights.join_group(group)

    async def leave_group(self, name: str) -> None:
        """Leave a group for broadcasts. Raises EngineError."""
        await self._weights.leave_group(name)

    async def load_adapter(self, path: str, version: PolicyVersion) -> None:
        """Take a LoRA adapter from a folder; later generations use it, earlier ones keep theirs.

        Safe to repeat: if it refuses, it is asked what it holds, since it may have loaded the adapter though its answer
        was lost, have started again without it, or hold adapters of a run before this one, which go.

        Raises:
            EngineError: the engine cannot be reached, or refuses the adapter.
        """
        adapter = Adapter(adapter_name(self.labels.write(version)), version)
        if self._shelf.newest is None:
            for name in filter(is_adapter_name, (await self._adapter_sources()).keys() - {adapter.name}):
                self._unload_later(name)
        body, self._listed = {"lora_name": adapter.name, "lora_path": path}, None
        try:
            answer = await self._http.control("/load_lora_adapter", body, self._config.load_s)
        except EngineRefusedError:
            held = (await self._adapter_sources()).get(adapter.name)
            if held is None:
                raise
            answer = {}
            if held != path:
                await self._unload(adapter.name)
                answer = await self._http.control("/load_lora_adapter", body, self._config.load_s)
        self._listed = answer.get("loaded_adapters")
        if (old := self._shelf.put(adapter)) is not None:
            self._unload_later(old.name)

    async def ping(self) -> None:
        """Whether its process answers, paused or not, and is no other run's. Raises EngineError, EngineTakenError."""
        self.labels.check((await self.model_info()).get("weight_version"))

    async def probe(self) -> PolicyVersion:
        """Whether it is well, and the version that it serves; not while paused.

        An engine that started again has lost its adapters, and serves its base weights. Servers without ``/ready``
        say only by their health whether they are paused.

        Raises:
            EngineError: it is not well, or what it serves cannot be told.
            EngineTakenError: it belongs to another run.
        """
        response = await self._http.get("/health")
        if response.status != HTTPStatus.OK:
            raise EngineError(f"engine {self.name}: /health: {error_text(response)}")
        if (await self._http.get("/ready")).status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise EngineError(f"engine {self.name} is paused")
        version = self.labels.served(await self.model_info())
        while (adapter := self._shelf.newest) is not None:
            if adapter.name in await self._adapter_sources():
                return adapter.version
            if adapter == self._shelf.newest:  # else a newer one took its place meanwhile
                break
        # A run that was resumed labels the base weights with the version of its first adapter.
        if adapter is not None and version == adapter.version:
            raise self._lacks(adapter)
        return version

    async def is_well(self, limit_s: float) -> bool:
        """Whether it says within `limit_s` that it is; SGLang does not while it is paused, since it generates for that.

        Other than `probe` this does not ask what it serves.
        """
        try:
            async with asyncio.timeout(limit_s):
                return (await self._http.get("/health")).status == HTTPStatus.OK
        except (EngineError, TimeoutError):
            return False

    async def rename(self, version: PolicyVersion) -> None:
        """Call the weights that are served another version; no request is interrupted. Raises EngineError."""
        if self.labels.mark is not None:
            await self.ping()  # another run's mark is not to be overwritten
        await self.relabel(self.labels.write(version))

    async def relabel(self, label: str) -> None:
        """Rename the weights that are served, without touching requests in flight. Raises EngineError."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._http.control("/update_weight_version", body, self._config.control_s)

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
        answer = await self._http.repeat("/weights_checker", {"action": "checksum"}, self._config.load_s, 1)
        checksums = {checksum_key(info.get("dtype"), name): digest for name, digest in parse_checksums(answer)}
        return Receipt(self.name, self.labels.served(info), checksums, time.monotonic() - start, 0)

    async def model_info(self) -> dict[str, Any]:
        """What the engine says of itself; answers in any state. Raises EngineError."""
        return await self.read("/model_info")

    async def read(self, path: str) -> dict[str, Any]:
        """What a path shows. Raises EngineError."""
        return await self._http.read(path)

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        for task in list(self._unloading):
            task.cancel()
        await self._http.close()

    async def _generate(self, request: GenerationRequest, adapter: Adapter | None) -> Generation:
        keeps_kv = not self._pause_mode.flushes_cache
        # In every pause mode: a server does not flush while requests are under way, such as a test of its own health.
        cache_name = self._cache_name(request.expects) if request.expects else None
        body = generation_body(request, cache_name, adapter.name if adapter else None)
        content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            response = await self._http.post("/generate", content, self._config.generate_s)
        except asyncio.CancelledError:
            await self._abort_quietly(request.rid)
            raise
        except TimeoutError:
            await self._abort_quietly(request.rid)
            message = f"{self.name} gave no reply within {self._config.generate_s:g} s"
            raise EpisodeError(Boundary.TIMEOUT, "engine.generate", message) from None
        except NoAnswerError as error:
            message = f"{self.name} at {self.url}: {error}"
            raise EpisodeError(Boundary.ENGINE, "unreachable", message) from error
        if response.status != HTTPStatus.OK:
            raise generation_failure(self.name, response)
        answer = decoded(response)
        if (reason := mismatch(answer, body)) is not None:
            message = f"{self.name} answered something else than request {request.rid}: {reason}"
            raise EpisodeError(Boundary.CONTRACT, "engine.identity", message)
        try:
            return parse_generation(answer, request, keeps_kv, self.labels.read)
        except EngineRestartedError as error:
            raise EpisodeError(Boundary.ENGINE, "unreachable", str(error)) from error

    def _cache_name(self, version: PolicyVersion) -> str:
        """What no request of another run, policy, epoch or version calls its part of the cache."""
        return f"{self.labels.write(version)} {self.name}"

    async def _score_again(self, token_ids: Sequence[int], start: int, adapter: Adapter | None) -> list[float]:
        """Up to three tries within one deadline. Raises EngineError."""
        ends = time.monotonic() + self._config.load_s
        for pause_s in _SCORE_PAUSES_S:
            try:
                return await self._score(token_ids, start, adapter, ends - time.monotonic())
            except LostAnswerError:
                if time.monotonic() + pause_s >= ends:
                    raise
            await asyncio.sleep(pause_s)
        return await self._score(token_ids, start, adapter, ends - time.monotonic())

    async def _score(
        self, token_ids: Sequence[int], start: int, adapter: Adapter | None, limit_s: float
    ) -> list[float]:
        """One try.

        Raises:
            LostAnswerError: no answer, or one to something else.
            EngineError: an answer that is no score of these tokens.
        """
        body = score_body(secrets.token_hex(16), token_ids, adapter.name if adapter else None, start)
        try:
            answer = await self._http.control("/generate", body, limit_s)
        except EngineRefusedError as error:
            if error.status not in (*GATEWAY_STATUSES, HTTPStatus.TOO_MANY_REQUESTS):
                raise
            raise LostAnswerError(str(error)) from error
        if (reason := mismatch(answer, body)) is not None:
            raise LostAnswerError(f"engine {self.name}: /generate scored something else: {reason}")
        try:
            return parse_scores(answer, token_ids[start - 1 :])
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"engine {self.name}: /generate gave no scores of the tokens sent: {error}") from error

    def _lacks(self, adapter: Adapter) -> EngineError:
        return EngineError(f"engine {self.name} does not list {adapter.name} among its models")

    async def _adapter_sources(self) -> dict[str, str | None]:
        """Folders of the adapters that the engine holds, by name; None where it names none."""
        models = (await self._http.read("/v1/models")).get("data", [])
        return {model.get("id"): model.get("root") for model in models}

    def _release(self, adapter: Adapter | None) -> None:
        """A call that used an adapter is over."""
        if adapter is not None and self._shelf.end(adapter):
            self._unload_later(adapter.name)

    async def _unload(self, name: str) -> None:
        await self._http.control("/unload_lora_adapter", {"lora_name": name}, self._config.load_s)

    def _unload_later(self, name: str) -> None:
        """Unload in the background: nobody waits for it, and the engine holds it back while it is used."""

        async def unload() -> None:
            with contextlib.suppress(EngineError):
                await self._unload(name)

        task = asyncio.create_task(unload(), name=f"unload-{name}")
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _abort_quietly(self, rid: str) -> None:
        """Tell the engine that nobody waits; the answer does not matter, nor does it if it is gone or hangs."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_TELL_S):
                await self.abort(rid)
