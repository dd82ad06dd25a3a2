"""The engine as an ASGI application: JSON bodies, tokens, status codes, and the step loop's life."""

from __future__ import annotations

import asyncio
import os
import secrets
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError
from agentrl.engine.server import EngineServer, Handler


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

    def add_view(path: str, view: Callable[[], dict[str, Any]]) -> None:
        # A coroutine, since the framework runs functions in threads, which wait for the interpreter beside a step.
        async def answer() -> Response:
            return _json(view())

        app.add_api_route(path, answer, methods=["GET"])

    for path, handler in server.control_routes().items():
        add_control(path, handler)
    add_view("/model_info", server.model_info)
    add_view("/health", lambda: {"status": "ok"})
    add_view("/v1/models", server.models)
    return app


async def _wait_for_hangup(http: HttpRequest) -> None:
    """Waits for: the client to close the connection. Unblocked by: that, or the end of the answer."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


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
    if isinstance(value, Response):
        return value
    return Response(orjson.dumps(value), status, media_type="application/json")
