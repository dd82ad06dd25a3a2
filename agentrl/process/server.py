"""Serves an object's methods to one caller: decode the arguments by their types, call, encode."""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
from collections import deque
from typing import Any, get_type_hints

import msgspec

from agentrl import codec
from agentrl.types.errors import EpisodeError, Failure, place_of, trace_of

HEADER = struct.Struct("<QQ")
"""What is before a call and before its answer: how long it is, and the number of the call."""


class Call(msgspec.Struct):
    """One call on the wire; arguments are encoded each by itself so that types decide their decoding."""

    method: str
    arguments: list[bytes]


class Reply(msgspec.Struct):
    """The answer to a call: a value, or an error's type name, message, traceback and where it was raised.

    An `EpisodeError` also brings its failure, so that it means the same on either side.
    """

    value: bytes = b""
    error: str | None = None
    message: str = ""
    trace: str = ""
    place: str = ""
    failure: Failure | None = None


class ObjectServer:
    """Answers encoded calls by calling `target`, whose public methods take annotated positional arguments.

    Coroutine methods run on an event loop of the server's own.

    Example: ``ObjectServer(Adder()).dispatch(encoded_call)`` gives an encoded `Reply`.
    """

    def __init__(self, target: object) -> None:
        self._target = target
        self.loop = asyncio.new_event_loop()

    def dispatch(self, request: bytes) -> bytes:
        """Run one call; whatever the method raises travels back as a reply."""
        try:
            value = self._begin(request)
            if inspect.iscoroutine(value):
                value = self.loop.run_until_complete(value)
            return codec.encode(Reply(value=codec.encode(value)))
        except Exception as error:  # noqa: BLE001 - the caller's process is where errors are handled
            return _failed(error)

    async def dispatch_beside(self, request: bytes) -> bytes:
        """The same for a coroutine method, on the loop on which another one runs."""
        try:
            return codec.encode(Reply(value=codec.encode(await self._begin(request))))
        except Exception as error:  # noqa: BLE001 - the caller's process is where errors are handled
            return _failed(error)

    def _begin(self, request: bytes) -> Any:
        call = codec.decode(request, Call)
        if call.method.startswith("_"):
            raise AttributeError(call.method)
        method = getattr(self._target, call.method)
        hints = get_type_hints(method)
        names = list(inspect.signature(method).parameters)
        return method(*(codec.decode(data, hints[name]) for name, data in zip(names, call.arguments, strict=True)))


def serve(target: object, fd: int, beside: frozenset[str] = frozenset()) -> None:
    """Answer calls that arrive on socket `fd` one after the other, until the other side closes it.

    Coroutine methods that `beside` names are called at once, also while another coroutine method is waited for.
    """
    with socket.socket(fileno=fd) as connection:
        _Calls(connection, ObjectServer(target), beside).serve()


class _Calls:
    """The calls of one socket. One that comes while another is carried out waits, unless it is called beside it."""

    def __init__(self, connection: socket.socket, server: ObjectServer, beside: frozenset[str]) -> None:
        self._connection, self._server, self._beside = connection, server, beside
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._at_work: set[asyncio.Task[None]] = set()
        if beside:
            server.loop.add_reader(connection, self._hear)

    def serve(self) -> None:
        while (call := self._waiting.popleft() if self._waiting else self._receive()) is not None:
            number, request = call
            self._answer(number, self._server.dispatch(request))
            while self._at_work:  # another may come while these are waited for
                self._server.loop.run_until_complete(asyncio.wait(self._at_work))

    def _hear(self) -> None:
        """Take a call while the loop runs another one."""
        call = self._receive()
        if call is None:
            self._server.loop.remove_reader(self._connection)
        elif codec.decode(call[1], Call).method in self._beside:
            task = self._server.loop.create_task(self._answer_beside(*call))
            self._at_work.add(task)
            task.add_done_callback(self._at_work.discard)
        else:
            self._waiting.append(call)

    async def _answer_beside(self, number: int, request: bytes) -> None:
        self._answer(number, await self._server.dispatch_beside(request))

    def _receive(self) -> tuple[int, bytes] | None:
        """The next call with its number; None at the other side's end. Waits for: it. Unblocked by: it, or that end."""
        header = _receive_exactly(self._connection, HEADER.size)
        if header is None:
            return None
        size, number = HEADER.unpack(header)
        request = _receive_exactly(self._connection, size)
        return None if request is None else (number, request)

    def _answer(self, number: int, reply: bytes) -> None:
        self._connection.sendall(HEADER.pack(len(reply), number) + reply)


def _failed(error: Exception) -> bytes:
    failure = error.failure if isinstance(error, EpisodeError) else None
    kind, trace, place = type(error).__name__, trace_of(error), place_of(error)
    return codec.encode(Reply(error=kind, message=str(error), trace=trace, place=place, failure=failure))


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """So many bytes; None at the other side's end. Waits for: them. Unblocked by: them, or that end."""
    chunks = bytearray()
    while len(chunks) < size:
        chunk = connection.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
