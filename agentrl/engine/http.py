"""HTTP for an engine: calls to handlers, JSON bodies, tokens and status codes."""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import orjson
import uvicorn

from agentrl.engine.request import BadRequestError, UnwellError
from agentrl.engine.server import EngineServer

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_KEEP_ALIVE_S = 600


class HttpServer(uvicorn.Server):
    """Serves an engine on the event loop that it steps on, and leaves signals alone: the process handles them."""

    def __init__(self, server: EngineServer, token: str | None) -> None:
        config = uvicorn.Config(
            EngineApplication(server, token),
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


class EngineApplication:
    """An engine as an ASGI application; a control call is carried out to its end, whatever becomes of its client."""

    def __init__(self, server: EngineServer, token: str | None) -> None:
        self._token = None if token is None else f"Bearer {token}".encode()
        self._generation = server.generation
        self._scheduler = server.scheduler
        self._views = {f"GET {path}": view for path, view in server.views().items()}
        self._controls = {f"POST {path}": handler for path, handler in server.control_routes().items()}

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """One call.

        Waits for: its body and its handler. Unblocked by: their ends, or a client that hangs up.
        """
        data = await self._read_body(receive)
        if data is None:
            return
        try:
            answer = await self._answer(scope, data, receive, send)
        except BadRequestError as error:
            answer = 400, _error(str(error), {"success": False} | error.fields)
        except UnwellError as error:
            answer = 503, _error(str(error))
        except Exception:  # noqa: BLE001 - a handler's own fault ends its call and not the engine
            answer = 500, _failed()
        if answer is not None:
            status, body = answer
            await send(_start(status, _JSON, (b"content-length", b"%d" % len(body))))
            await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Event, data: bytes, receive: Receive, send: Send) -> tuple[int, bytes] | None:
        """Status and body; None if a stream has been sent."""
        route = f"{scope['method']} {scope['path']}"
        if route == "POST /generate":
            return await self._generate(_parse(data), receive, send)
        if (view := self._views.get(route)) is not None:
            return 200, orjson.dumps(view())
        handler = self._controls.get(route)
        if handler is None:
            return 404, _error(f"there is no {route}")
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._token is not None and not secrets.compare_digest(given, self._token):
            return 401, _error(f"{scope['path']} needs the engine's bearer token")
        value = await handler(_parse(data))
        return 200, value if isinstance(value, bytes) else orjson.dumps(value)

    async def _generate(self, body: dict[str, Any], receive: Receive, send: Send) -> tuple[int, bytes] | None:
        hangup = asyncio.create_task(_until_hangup(receive), name="watch-client")
        if not body.get("stream"):
            return 200, orjson.dumps(await self._generation.generate(body, hangup))
        await _send_stream(self._generation.stream(body, hangup), send)
        return None

    async def _read_body(self, receive: Receive) -> bytes | None:
        """A request's body; None if the client is gone before its end."""
        event = await receive()
        pieces = [event.get("body", b"")]
        # Between two steps the loop takes only a few pieces, and weights come in thousands.
        with self._scheduler.loop_needed():
            while event.get("more_body"):
                event = await receive()
                pieces.append(event.get("body", b""))
        return None if event["type"] == "http.disconnect" else b"".join(pieces)


async def _send_stream(pieces: AsyncIterator[bytes], send: Send) -> None:
    """Each piece once the client has taken the one before it; a fault behind the first is an event of the stream."""
    first = await anext(pieces)
    await send(_start(200, _EVENTS))
    end = b""
    try:
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except Exception:  # noqa: BLE001 - its call has a status already
        end = b"data: " + _failed() + b"\n\n"
    await send({"type": "http.response.body", "body": end})


async def _until_hangup(receive: Receive) -> None:
    """Waits for: the client to close its connection. Unblocked by: that, or the end of the answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, content_type: bytes, *headers: tuple[bytes, bytes]) -> Event:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type), *headers]}


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise BadRequestError("the body must be JSON; {} is enough where nothing is asked for") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _failed() -> bytes:
    """The body of a call whose handler has just raised something unforeseen."""
    traceback.print_exc()
    return _error("the engine failed at this; its log says how")


def _error(message: str, more: dict[str, Any] | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message}} | (more or {}))
