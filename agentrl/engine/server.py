"""The engine's control surface: SGLang's native routes over one scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agentrl.engine.adapters import AdapterService
from agentrl.engine.forward import PassRunner
from agentrl.engine.generation import GenerationService
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError, UnwellError
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.updates import Handler, UpdateRoutes
from agentrl.engine.weights import WeightStore
from agentrl.types.weights import PauseMode

_TAGS = ("kv_cache", "weights")
_PAUSE_MODES = [str(mode) for mode in PauseMode if mode.of_server is mode]


class EngineServer:
    """Handlers of pausing and aborting; generation, weight updates and memory have classes of their own.

    Unlike the real server this one answers ``/health`` while paused, and matches request ids exactly.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        model = ServedModel(options)
        store = WeightStore(model.network)
        self.scheduler = Scheduler(
            model,
            PassRunner(model, options.deterministic, options.steps.long_step_s),
            options.max_running_requests,
            options.steps.prefill_tokens,
            options.updates.weight_version,
        )
        self.adapters = AdapterService(model.lora, self.scheduler, options.updates.max_lora_rank)
        self.generation = GenerationService(self.scheduler, self.adapters, model.eos_token_ids, model.vocab_size)
        self._updates = UpdateRoutes(self.scheduler, store, options.updates.collective_s)
        self._memory = MemoryRoutes(self.scheduler, store)

    def control_routes(self) -> dict[str, Handler]:
        """POST routes by path; each takes the JSON body and returns one, or bytes as they are."""
        return {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            **self._updates.routes(),
            **self._memory.routes(),
            **self.adapters.routes(),
        }

    def views(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """GET routes by path; they answer whatever state the engine is in."""
        return {
            "/model_info": self._model_info,
            "/health": self._health,
            "/ready": self._ready,
            "/v1/models": self._models,
        }

    def _health(self) -> dict[str, Any]:
        """Raises UnwellError if a step takes too long; during one on the event loop this call waits as well."""
        computing_s = self.scheduler.computing_s
        if computing_s >= self._options.steps.hung_step_s:
            raise UnwellError(
                f"a step has been computed for {computing_s:.0f} s; start the engine anew, with a larger --hung-step-s "
                "if steps may take so long"
            )
        return {"status": "ok"}

    def _ready(self) -> dict[str, Any]:
        """Raises UnwellError while it is paused, as requests would wait."""
        if self.scheduler.pause_mode is not None:
            raise UnwellError(f"paused ({self.scheduler.pause_mode}); /continue_generation ends it")
        return {"status": "ok"}

    def _model_info(self) -> dict[str, Any]:
        """What is served."""
        return {
            "model_path": str(self._options.model),
            "weight_version": self.scheduler.version,
            "reports_kv_versions": True,
            "is_generation": True,
            "dtype": "float64" if self._options.deterministic else self._options.dtype,
            "context_length": self.scheduler.model.context_length,
            "vocab_size": self.scheduler.model.vocab_size,
            "paused": self.scheduler.pause_mode,
            "num_running": self.scheduler.num_running,
            "num_waiting": self.scheduler.num_waiting,
        }

    def _models(self) -> dict[str, Any]:
        """What can be asked for."""
        base = {"id": str(self._options.model), "object": "model", "owned_by": "agentrl"}
        loaded = self.adapters.sources().items()
        adapters = [base | {"id": name, "root": source, "parent": base["id"]} for name, source in loaded]
        return {"object": "list", "data": [base, *adapters]}

    async def _abort(self, body: dict[str, Any]) -> bytes:
        rid = body.get("rid")
        if not body.get("abort_all") and not isinstance(rid, str):
            raise BadRequestError("abort_request needs rid or abort_all")
        async with self.scheduler.between_steps():
            self.scheduler.abort(None if body.get("abort_all") else rid)
        return b""

    async def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = body.get("mode", PauseMode.ABORT)
        if asked not in _PAUSE_MODES:
            raise BadRequestError(f"mode must be one of {_PAUSE_MODES}")
        mode = PauseMode(asked)
        async with self.scheduler.between_steps():
            interrupted = self.scheduler.pause(mode)
        return {"status": "ok", "message": "Generation paused successfully.", "num_paused_requests": interrupted}

    async def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        # Behind earlier callers: it must not overtake a pause that was asked for before it.
        async with self.scheduler.between_steps():
            if self.scheduler.num_waiting and (reason := self.scheduler.refusal()) is not None:
                raise BadRequestError(reason)
            self.scheduler.resume()
        return {"status": "ok", "message": "Generation continued successfully."}

    async def _flush(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self.scheduler.between_steps():
            if not self.scheduler.flush():
                raise BadRequestError(f"Flush cache failed: {self.scheduler.num_running} requests hold KV")
        return {"status": "ok", "message": "Cache flushed."}


class MemoryRoutes:
    """Frees the KV cache and the weights, by SGLang's tags.

    Generation is refused until the KV cache was resumed and every released tensor was brought by an
    update. Resuming ``weights`` allocates nothing: an update brings memory of its own.
    """

    def __init__(self, scheduler: Scheduler, store: WeightStore) -> None:
        self._scheduler, self._store = scheduler, store
        scheduler.refusal = self._refusal

    def routes(self) -> dict[str, Handler]:
        """POST routes by path; each takes the JSON body."""
        return {"/release_memory_occupation": self._release, "/resume_memory_occupation": self._resume}

    async def _release(self, body: dict[str, Any]) -> None:
        tags = _tags(body)
        async with self._scheduler.between_steps():
            self._release_now(tags)

    async def _resume(self, body: dict[str, Any]) -> None:
        tags = _tags(body)
        async with self._scheduler.between_steps():
            if "kv_cache" in tags:
                self._scheduler.model.cache.resume()

    def _release_now(self, tags: list[str]) -> None:
        scheduler = self._scheduler
        is_idle = not scheduler.num_running and (scheduler.pause_mode is not None or not scheduler.num_waiting)
        if not is_idle:
            raise BadRequestError("requests hold memory; wait for their end, or pause by abort or retract")
        scheduler.flush()
        if "kv_cache" in tags:
            scheduler.model.cache.release()
        if "weights" in tags:
            self._store.release()
        if self._store.device.type == "cuda":
            # Freed memory stays with this process's allocator, where no other process can have it.
            torch.cuda.empty_cache()

    def _refusal(self) -> str | None:
        if self._scheduler.model.cache.is_released:
            return "the KV cache is released; call resume_memory_occupation first"
        if self._store.missing:
            num_missing = len(self._store.missing)
            return f"the memory of {num_missing} weights was released; update all weights first"
        return None


def _tags(body: dict[str, Any]) -> list[str]:
    tags = body.get("tags")
    if tags is None:
        return list(_TAGS)
    if not isinstance(tags, list) or not set(map(str, tags)) <= set(_TAGS):
        raise BadRequestError(f"tags must be some of {list(_TAGS)}, got {tags!r}")
    return tags
