"""The engine's side of its front: calls to handlers, JSON bodies, tokens and status codes."""

from __future__ import annotations

import asyncio
import secrets
import traceback
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl.engine.link import Kind, Link, Message
from agentrl.engine.request import BadRequestError, UnwellError
from agentrl.engine.server import EngineServer

Hangup = asyncio.Future[None]


@dataclass(slots=True)
class _Open:
    """A call without an answer yet: its client, who may be gone, and whether the last piece has reached it."""

    hangup: Hangup
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False

    def hang_up(self) -> None:
        """Nobody waits for the answer any more."""
        self.is_gone = True
        self.taken.set()
        if not self.hangup.done():
            self.hangup.set_result(None)


class CallServer:
    """Answers the calls that the front hands over; every call gets one answer, whatever becomes of its client.

    `ended` is set when the front is gone.
    """

    def __init__(self, server: EngineServer, token: str | None) -> None:
        self._token = None if token is None else f"Bearer {token}".encode()
        self._generation = server.generation
        self._views = {f"GET {path}": view for path, view in server.views().items()}
        self._controls = {f"POST {path}": handler for path, handler in server.control_routes().items()}
        self._open: dict[int, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        self.link = Link(self._hear, self.ended.set)

    def _hear(self, message: Message) -> None:
        if message.kind is Kind.CALL:
            self._open[message.call] = _Open(asyncio.get_running_loop().create_future())
            task = asyncio.create_task(self._serve(message), name=message.note.rpartition(" ")[2])
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (call := self._open.get(message.call)) is None:
            return  # it has been answered meanwhile
        elif message.kind is Kind.TAKEN:
            call.taken.set()
        else:
            call.hang_up()

    async def _serve(self, call: Message) -> None:
        """Waits for: the call's handler. Unblocked by: its end."""
        try:
            status, body = await self._answer(call)
        except BadRequestError as error:
            status, body = 400, _error(str(error), {"success": False} | error.fields)
        except UnwellError as error:
            status, body = 503, _error(str(error))
        except Exception:  # noqa: BLE001 - a handler's own fault ends its call and not the engine
            traceback.print_exc()
            status, body = 500, _error("the engine failed at this; its log says how")
        finally:
            self._open.pop(call.call).hangup.cancel()
        self.link.send(Message(Kind.ANSWER, call.call, str(status), body))

    async def _answer(self, call: Message) -> tuple[int, bytes]:
        authorization, _, route = call.note.partition("\n")
        if route == "POST /generate":
            return 200, await self._generate(call.call, _parse(call.body))
        if (view := self._views.get(route)) is not None:
            return 200, orjson.dumps(view())
        handler = self._controls.get(route)
        if handler is None:
            return 404, _error(f"there is no {route}")
        if self._token is not None and not secrets.compare_digest(authorization.encode("latin-1"), self._token):
            return 401, _error(f"{route.removeprefix('POST ')} needs the engine's bearer token")
        return 200, _body(await handler(_parse(call.body)))

    async def _generate(self, number: int, body: dict[str, Any]) -> bytes:
        """Waits for: the request's end, and of a stream also for its reader. Unblocked by: these, or a hangup."""
        call = self._open[number]
        if not body.get("stream"):
            return orjson.dumps(await self._generation.generate(body, call.hangup))
        async for piece in self._generation.stream(body, call.hangup):
            if not call.is_gone:
                call.taken.clear()
                self.link.send(Message(Kind.PIECE, number, body=piece))
                await call.taken.wait()
        return b""


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise BadRequestError("the body must be JSON; {} is enough where nothing is asked for") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _body(value: Any) -> bytes:
    return value if isinstance(value, bytes) else orjson.dumps(value)


def _error(message: str, more: dict[str, Any] | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message}} | (more or {}))
