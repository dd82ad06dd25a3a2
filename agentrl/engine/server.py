"""The engine's control surface: SGLang's native routes over one scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.engine.adapters import AdapterService
from agentrl.engine.forward import PassRunner
from agentrl.engine.generation import GenerationService
from agentrl.engine.memory import MemoryRoutes
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError, UnwellError
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.updates import Handler, UpdateRoutes
from agentrl.engine.weights import WeightStore
from agentrl.types.weights import PauseMode


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
        """Raises UnwellError if a step does not end; one on the event loop would keep the question waiting as well."""
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
        try:
            mode = PauseMode(body.get("mode", PauseMode.ABORT))
        except ValueError:
            raise BadRequestError(f"mode must be one of {[str(m) for m in PauseMode]}") from None
        async with self.scheduler.between_steps():
            interrupted = self.scheduler.pause(mode)
        return {"status": "ok", "message": "Generation paused successfully.", "num_paused_requests": interrupted}

    async def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        # In its turn: it must not overtake a pause that was asked for before it.
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
