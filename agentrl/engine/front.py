"""The process that speaks HTTP for an engine: ``python -m agentrl.engine.front FD LISTENER_FD``.

It hands each call to the engine over the socket with number FD, and the answer back, and knows nothing of either. So
the interpreter that draws tokens neither parses requests nor writes responses.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from agentrl.engine.link import Kind, Link, Message
from agentrl.process.loop import run_async
from agentrl.process.parent import leave_stopping_to_parent

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_KEEP_ALIVE_S = 600


class Front:
    """An ASGI application that lets the engine at the other end of its link answer."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is told when the engine is gone."""
        self.link = Link(self._hear, on_end)
        self.ready = asyncio.Event()
        self._numbers = itertools.cycle(range(2**32))
        self._open: dict[int, asyncio.Queue[Message]] = {}

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """One call.

        Waits for: the engine's answer. Unblocked by: it, which the engine owes even to a client that is gone, or the
        engine's death.
        """
        body = await _read_body(receive)
        if body is None:
            return
        number = next(self._numbers)
        answers = self._open[number] = asyncio.Queue()
        self.link.send(Message(Kind.CALL, number, _note(scope), body))
        watch = asyncio.create_task(self._watch(number, receive), name="watch-client")
        try:
            await self._pass_on(answers, send)
        finally:
            watch.cancel()
            del self._open[number]

    def _hear(self, message: Message) -> None:
        if message.kind is Kind.READY:
            self.ready.set()
        elif (answers := self._open.get(message.call)) is not None:
            answers.put_nowait(message)

    async def _pass_on(self, answers: asyncio.Queue[Message], send: Send) -> None:
        answer = await answers.get()
        is_streamed = answer.kind is Kind.PIECE
        if not is_streamed:
            length = (b"content-length", b"%d" % len(answer.body))
            await send({"type": "http.response.start", "status": int(answer.note), "headers": [_JSON, length]})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": [_EVENTS]})
        while answer.kind is Kind.PIECE:
            await send({"type": "http.response.body", "body": answer.body, "more_body": True})
            self.link.send(Message(Kind.TAKEN, answer.call))
            answer = await answers.get()
        # Behind pieces it is empty, or an error that came too late for a status.
        body = b"data: " + answer.body + b"\n\n" if is_streamed and answer.body else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _watch(self, number: int, receive: Receive) -> None:
        """Waits for: the client to close its connection. Unblocked by: that, or the end of the answer."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.link.send(Message(Kind.HANGUP, number))


async def serve(link: socket.socket, listener: socket.socket) -> None:
    """Take calls at a bound socket once the engine is ready; until then nobody listens, and connections are refused.

    Waits for: the engine's end. Unblocked by: that, by which this process ends at once.
    """
    front = Front(lambda: os._exit(0))
    config = uvicorn.Config(
        front,
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    await asyncio.get_running_loop().create_unix_connection(lambda: front.link, sock=link)
    await front.ready.wait()
    await _Server(config).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that ends with its engine, and not by signals, which a terminal sends to both."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


def _note(scope: Event) -> str:
    given = (value for name, value in scope["headers"] if name == b"authorization")
    return f"{next(given, b'').decode('latin-1')}\n{scope['method']} {scope['path']}"


async def _read_body(receive: Receive) -> bytes | None:
    """A request's body; None if the client is gone before its end."""
    pieces: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        pieces.append(event.get("body", b""))
        if not event.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def main() -> None:
    """Entry of the process."""
    link, listener = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:])
    leave_stopping_to_parent()
    run_async(serve(link, listener))


if __name__ == "__main__":
    main()
