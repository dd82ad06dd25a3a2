"""The gateway: an HTTP server in the process that plays episodes, where their programs find their policies.

A session is named by its key, which is the program's API key, or by path (``/sessions/KEY/v1/...``). A program sees a
weight update, a pause or an engine that dies as a slow reply.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from agentrl.gateway.calls import AnsweredCall, Session
from agentrl.gateway.chat import ChatDialect
from agentrl.gateway.connections import Connection, Listener
from agentrl.gateway.dialects import Dialect, ReadCall
from agentrl.gateway.messages import MessagesDialect
from agentrl.gateway.responses import ResponsesDialect
from agentrl.gateway.token_ids import TokenIdsDialect
from agentrl.rollouts.programs import ProgramCalls, SessionOverError
from agentrl.types.program import CallRefusedError, GatewayAccess

_MESSAGES = MessagesDialect()
_DIALECTS: tuple[Dialect, ...] = (ChatDialect(), ResponsesDialect(), _MESSAGES, TokenIdsDialect())
_MAX_BODY_BYTES = 64 << 20
_BEFORE_STREAM_S = 5.0
_KEEP_ALIVE_S = 3.0
_END_S = 5
# Programs keep their connections, and one that ends just as it is used again looks to them like a failure.
_KEPT_OPEN_S = 3600
_NOBODY_HEARS = 499
_KEPT_KEYS = 4096
_NO_STORE = {"cache-control": "no-store", "x-accel-buffering": "no"}
# SDKs of both vendors read it: what was refused is refused again.
_NEVER_AGAIN = {"x-should-retry": "false"}
_Handler = Callable[[Request], Awaitable[Response]]


class GatewayServer:
    """Answers the programs of all episodes that this process plays."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._http = _HttpServer(self._build_app())
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Take calls, on the socket and on a loopback port.

        Waits for: the server. Unblocked by: it. Raises OSError if the socket cannot be made.
        """
        inner = socket.socket(socket.AF_UNIX)
        inner.bind(str(self._socket_path))
        self._socket_path.chmod(0o666)  # sandboxes run under user ids of their own; a session's key is what lets one in
        outer = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{outer.getsockname()[1]}"
        self._serving = asyncio.create_task(self._http.serve(sockets=[inner, outer]), name="gateway")
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self._serving

    async def close(self) -> None:
        """Answer nobody any more; safe to call twice. Waits for: answers under way. Unblocked by: these, or seconds."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._http.should_exit = True
            await serving
            self._socket_path.unlink(missing_ok=True)

    @contextmanager
    def admit(self, calls: ProgramCalls) -> Iterator[GatewayAccess]:
        """Answer the calls of an episode within the block; those in flight end with it."""
        session = Session(calls)
        self._sessions[session.key] = session
        try:
            yield GatewayAccess(self.url, session.key, str(self._socket_path))
        finally:
            del self._sessions[session.key]
            self._ended[session.key] = None
            while len(self._ended) > _KEPT_KEYS:
                self._ended.popitem(last=False)
            session.end()

    def _build_app(self) -> FastAPI:
        app = FastAPI(title="agentrl gateway", openapi_url=None)
        for dialect in _DIALECTS:
            for path in (dialect.path, f"/sessions/{{key}}{dialect.path}"):
                app.post(path)(self._answering(dialect))
        for path in (_MESSAGES.count_path, f"/sessions/{{key}}{_MESSAGES.count_path}"):
            app.post(path)(self._count)
        app.exception_handler(404)(_nothing_here)
        for path in ("/v1/models", "/sessions/{key}/v1/models"):
            app.get(path)(self._models)
        return app

    def _answering(self, dialect: Dialect) -> _Handler:
        async def answer(request: Request) -> Response:
            try:
                return await self._answer(dialect, request)
            except CallRefusedError as refusal:
                return _refused(dialect, refusal)
            except ClientDisconnect:
                return Response(status_code=_NOBODY_HEARS)

        return answer

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        """The answer to a request; what is refused soon is no stream. Raises CallRefusedError or ClientDisconnect."""
        session = self._session(request)
        listener: Listener = request.state.listener
        read, call = await session.begin(dialect, await _read_body(request), request.headers, listener)
        await _until_answered(request, call, _BEFORE_STREAM_S if read.is_streamed else None)
        if read.is_streamed and not call.has_failed:
            return StreamingResponse(_events(dialect, read, call), media_type="text/event-stream", headers=_NO_STORE)
        answer = dialect.answer(read, await call.answer(), call.id)
        listener.ensure_there()
        return JSONResponse(answer)

    def _session(self, request: Request) -> Session:
        """The session that a request is of. Raises CallRefusedError."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.path_params.get("key") or request.headers.get("x-api-key") or bearer
        if key in self._ended:
            raise SessionOverError("its program has ended")
        if key not in self._sessions:
            message = "no session has this key; use the one that the scaffold was given, as API key or in the path"
            raise CallRefusedError(message, status=401, kind="authentication_error")
        return self._sessions[key]

    async def _count(self, request: Request) -> Response:
        try:
            calls = self._session(request).calls
            call = _MESSAGES.read_count(await _read_body(request))
            return JSONResponse(_MESSAGES.count(calls.prompt_tokens(call)))
        except CallRefusedError as refusal:
            return _refused(_MESSAGES, refusal)

    async def _models(self, request: Request) -> Response:
        try:
            calls = self._session(request).calls
        except CallRefusedError as refusal:
            return JSONResponse({"error": {"message": str(refusal), "type": refusal.kind}}, refusal.status)
        # `max_model_len` is vLLM's: the longest context, prompt and reply together.
        card = {"object": "model", "created": 0, "owned_by": "agentrl", "max_model_len": calls.max_context_tokens}
        return JSONResponse({"object": "list", "data": [{"id": name} | card for name in calls.models]})


class _HttpServer(uvicorn.Server):
    """Serves an application on the run's own event loop, and leaves signals to the run."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEPT_OPEN_S,
                timeout_graceful_shutdown=_END_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def _refused(dialect: Dialect, refusal: CallRefusedError) -> Response:
    status = dialect.over_status if isinstance(refusal, SessionOverError) else refusal.status
    return JSONResponse(dialect.error(refusal), status, _NEVER_AGAIN)


async def _events(dialect: Dialect, read: ReadCall, call: AnsweredCall) -> AsyncIterator[str]:
    """Waits for: the reply, saying every few seconds that it comes. Unblocked by: it, or a client that hangs up."""
    try:
        while not (await asyncio.wait([call.reply], timeout=_KEEP_ALIVE_S))[0]:
            yield dialect.keep_alive(call.id)
        for event in dialect.events(read, await call.answer(), call.id):
            yield event
    except CallRefusedError as refusal:
        yield dialect.error_event(refusal, call.id)


async def _until_answered(request: Request, call: AnsweredCall, limit_s: float | None) -> None:
    """Waits for: the reply. Unblocked by: it, a limit, or a client that hangs up, which raises ClientDisconnect."""
    gone = asyncio.create_task(_until_gone(request), name="client-gone")
    try:
        await asyncio.wait([call.reply, gone], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnect
    finally:
        gone.cancel()


async def _until_gone(request: Request) -> None:
    """Waits for: a client to hang up, whose request was read whole. Ends by cancellation as well."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _nothing_here(request: Request, error: Exception) -> Response:
    paths = ", ".join(dialect.path for dialect in _DIALECTS)
    message = f"nothing is served at {request.url.path}; a program may call {paths} and /v1/models"
    return JSONResponse({"error": {"message": message, "type": "not_found_error"}}, 404, _NEVER_AGAIN)


async def _read_body(request: Request) -> bytes:
    """The whole body. Raises CallRefusedError if it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise CallRefusedError(f"the body is over {_MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)
