"""Serves an object's methods to one caller: decode the arguments by their types, call, encode."""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
from typing import get_type_hints

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

    Coroutine methods run on an event loop of the server's own, one call at a time.

    Example: ``ObjectServer(Adder()).dispatch(encoded_call)`` gives an encoded `Reply`.
    """

    def __init__(self, target: object) -> None:
        self._target = target
        self._loop: asyncio.AbstractEventLoop | None = None

    def dispatch(self, request: bytes) -> bytes:
        """Run one call; whatever the method raises travels back as a reply."""
        try:
            call = codec.decode(request, Call)
            value = self._run(call)
            return codec.encode(Reply(value=codec.encode(value)))
        except Exception as error:  # noqa: BLE001 - the caller's process is where errors are handled
            failure = error.failure if isinstance(error, EpisodeError) else None
            kind, trace, place = type(error).__name__, trace_of(error), place_of(error)
            reply = Reply(error=kind, message=str(error), trace=trace, place=place, failure=failure)
            return codec.encode(reply)

    def _run(self, call: Call) -> object:
        if call.method.startswith("_"):
            raise AttributeError(call.method)
        method = getattr(self._target, call.method)
        hints = get_type_hints(method)
        names = list(inspect.signature(method).parameters)
        arguments = [codec.decode(data, hints[name]) for name, data in zip(names, call.arguments, strict=True)]
        value = method(*arguments)
        if inspect.iscoroutine(value):
            self._loop = self._loop or asyncio.new_event_loop()
            value = self._loop.run_until_complete(value)
        return value


def serve(target: object, fd: int) -> None:
    """Answer calls that arrive on socket `fd` until the other side closes it."""
    server = ObjectServer(target)
    with socket.socket(fileno=fd) as connection:
        while (header := _receive_exactly(connection, HEADER.size)) is not None:
            size, number = HEADER.unpack(header)
            request = _receive_exactly(connection, size)
            if request is None:
                return
            reply = server.dispatch(request)
            connection.sendall(HEADER.pack(len(reply), number) + reply)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """So many bytes; None at the other side's end. Waits for: them. Unblocked by: them, or that end."""
    chunks = bytearray()
    while len(chunks) < size:
        chunk = connection.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
