"""The engine's HTTP surface: SGLang's native routes, JSON in and out."""

from __future__ import annotations

import asyncio
import os
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from agentrl.engine.adapters import AdapterService
from agentrl.engine.generation import GenerationService
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError
from agentrl.engine.scheduler import PauseMode, Scheduler
from agentrl.engine.unpickler import load_named_tensors
from agentrl.engine.weights import WeightStore

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class EngineServer:
    """Handlers of the control routes; generation has its own service.

    A weight update between ``begin`` and ``end`` keeps its KV flush and version for the end. Unlike
    the real server this one refuses a bad update before it touches a tensor, answers ``/health`` while
    paused, and matches request ids exactly.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        model = ServedModel(options)
        self._weights = WeightStore(model.network)
        self.scheduler = Scheduler(
            model,
            options.max_running_requests,
            options.prefill_tokens,
            options.deterministic,
            options.updates.weight_version,
        )
        self.adapters = AdapterService(model.lora, self.scheduler, options.updates.max_lora_rank)
        self.generation = GenerationService(self.scheduler, self.adapters, model.eos_token_ids, model.vocab_size)
        self._in_session = False

    def control_routes(self) -> dict[str, Handler]:
        """POST routes by path; each takes the JSON body."""
        return {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/begin_weight_update": self._begin_update,
            "/end_weight_update": self._end_update,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/update_weight_version": self._update_version,
            "/weights_checker": self._check_weights,
            **self.adapters.routes(),
        }

    def model_info(self) -> dict[str, Any]:
        """What is served; answers whatever state the engine is in."""
        return {
            "model_path": str(self._options.model),
            "weight_version": self.scheduler.version,
            "is_generation": True,
            "dtype": "float64" if self._options.deterministic else self._options.dtype,
            "context_length": self.scheduler.model.context_length,
            "vocab_size": self.scheduler.model.vocab_size,
            "paused": self.scheduler.pause_mode,
            "num_running": self.scheduler.num_running,
            "num_waiting": self.scheduler.num_waiting,
        }

    async def _abort(self, body: dict[str, Any]) -> None:
        rid = body.get("rid")
        if not body.get("abort_all") and not isinstance(rid, str):
            raise BadRequestError("abort_request needs rid or abort_all")
        self.scheduler.abort(None if body.get("abort_all") else rid)

    async def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            mode = PauseMode(body.get("mode", PauseMode.ABORT))
        except ValueError:
            raise BadRequestError(f"mode must be one of {[str(m) for m in PauseMode]}") from None
        interrupted = self.scheduler.pause(mode)
        return _ok("Generation paused successfully.", num_paused_requests=interrupted)

    async def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        self.scheduler.resume()
        return _ok("Generation continued successfully.")

    async def _flush(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.scheduler.flush():
            raise BadRequestError(f"Flush cache failed: {self.scheduler.num_running} requests hold KV")
        return _ok("Cache flushed.")

    async def _begin_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._in_session:
            raise BadRequestError("a weight update is open already; end it first")
        await self.scheduler.wait_until_still()
        self._in_session = True
        return _ok("Weight update begun.")

    async def _end_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._in_session:
            raise BadRequestError("no weight update is open; begin one first")
        self._in_session = False
        return _ok("Weight update ended.")

    async def _update_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        folder = body.get("model_path")
        if not isinstance(folder, str):
            raise BadRequestError("update_weights_from_disk needs model_path, a string")
        return await self._update(body, lambda: self._weights.load_folder(Path(folder)))

    async def _update_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._in_session:
            raise BadRequestError(
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or len(payloads) != 1 or not isinstance(payloads[0], str):
            raise BadRequestError("serialized_named_tensors must be a list of one base64 string")
        if body.get("load_format") not in (None, "direct"):
            raise BadRequestError(f"load_format {body['load_format']!r} is not served; use null")
        return await self._update(body, lambda: self._weights.load(load_named_tensors(payloads[0])))

    async def _update(self, body: dict[str, Any], load: Callable[[], int]) -> dict[str, Any]:
        """Load while nothing runs; flush first, so that a refusal leaves the engine as it was."""
        await self.scheduler.wait_until_still()
        if body.get("flush_cache", True) and not self.scheduler.flush():
            raise BadRequestError(
                f"{self.scheduler.num_running} frozen requests hold KV; send flush_cache=false or pause by retract"
            )
        num_bytes = load()
        version = body.get("weight_version")
        self.scheduler.loaded(str(version) if version is not None else None)
        return {
            "success": True,
            "message": f"Succeeded to update model weights. Weight version updated to {self.scheduler.version}.",
            "num_paused_requests": self.scheduler.num_running,
            "num_bytes": num_bytes,
        }

    async def _update_version(self, body: dict[str, Any]) -> dict[str, Any]:
        version = body.get("new_version")
        if not isinstance(version, str):
            raise BadRequestError("update_weight_version needs new_version, a string")
        if body.get("abort_all_requests", True):
            self.scheduler.abort(None)
        self.scheduler.relabel(version)
        return {"success": True, "message": f"Weight version updated to {version}.", "new_version": version}

    async def _check_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("action") != "checksum":
            raise BadRequestError("weights_checker serves the action 'checksum' only")
        return {"success": True, "checksums": self._weights.checksums(), "weight_version": self.scheduler.version}


def build_app(options: EngineOptions) -> FastAPI:
    """The engine as an ASGI application; it loads the model here and steps while the app runs."""
    server = EngineServer(options)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.create_task(server.scheduler.run(), name="engine-steps")
        loop.add_done_callback(_exit_if_failed)
        yield
        loop.cancel()

    app = FastAPI(title="agentrl engine", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/generate")
    async def generate(http: HttpRequest) -> Response:
        try:
            body = await _read_body(http)
            hangup = asyncio.create_task(_wait_for_hangup(http))
            if body.get("stream"):
                return StreamingResponse(server.generation.stream(body, hangup), media_type="text/event-stream")
            return _json(await server.generation.generate(body, hangup))
        except BadRequestError as error:
            return _json({"error": {"message": str(error)}}, 400)

    def add_control(path: str, handler: Handler) -> None:
        async def control(http: HttpRequest) -> Response:
            if options.token is not None and not _has_token(http, options.token):
                return _json({"error": {"message": f"{path} needs the engine's bearer token"}}, 401)
            try:
                return _json(await handler(await _read_body(http)))
            except BadRequestError as error:
                return _json({"error": {"message": str(error)}, "success": False} | error.fields, 400)

        app.add_api_route(path, control, methods=["POST"])

    for path, handler in server.control_routes().items():
        add_control(path, handler)
    app.add_api_route("/model_info", lambda: server.model_info(), methods=["GET"])
    app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])
    app.add_api_route("/v1/models", lambda: _models(options, server.adapters), methods=["GET"])
    return app


async def _wait_for_hangup(http: HttpRequest) -> None:
    """Waits for: the client to close the connection. Unblocked by: that, or the end of the answer."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _models(options: EngineOptions, adapters: AdapterService) -> dict[str, Any]:
    base = {"id": str(options.model), "object": "model", "owned_by": "agentrl"}
    loaded = adapters.sources().items()
    return {"object": "list", "data": [base, *(base | {"id": n, "root": s, "parent": base["id"]} for n, s in loaded)]}


def _exit_if_failed(task: asyncio.Task[None]) -> None:
    """A step loop that fails would leave every request waiting for ever: end the process instead."""
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception())
        os._exit(1)


def _has_token(http: HttpRequest, token: str) -> bool:
    return secrets.compare_digest(http.headers.get("authorization", ""), f"Bearer {token}")


async def _read_body(http: HttpRequest) -> dict[str, Any]:
    try:
        body = orjson.loads(await http.body())
    except orjson.JSONDecodeError:
        raise BadRequestError("the body must be JSON; {} is enough where nothing is asked for") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _json(value: Any, status: int = 200) -> Response:
    content = b"" if value is None else orjson.dumps(value)
    return Response(content, status, media_type="application/json")


def _ok(message: str, **more: Any) -> dict[str, Any]:
    return {"status": "ok", "message": message, **more}
