"""Calls in both directions over one socket, many in flight at once.

A frame is its length in 8 bytes and a msgpack array: kind, number, name, values. Either side calls by a number of its
own and gets one answer under it, in whatever order answers come; a note gets none. What a method raises travels as
data. Whoever gives a call up, by its deadline or because it is cancelled, tells the other side, which then cancels
what it does for it. When the other process ends, whoever waits for it hears of that at once.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import msgspec

from agentrl import codec
from agentrl.process.remote import RemoteCallError
from agentrl.process.server import Reply
from agentrl.types.errors import AgentRLError, EpisodeError, place_of, trace_of

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
_LENGTH = struct.Struct("<Q")
_log = logging.getLogger(__name__)


class ChannelClosedError(AgentRLError):
    """The process at the other end is gone, or has been given up."""


class _Kind(IntEnum):
    """What a frame is. An answer has one value, an error a `Reply`, a cancellation none."""

    CALL = 0
    NOTE = 1
    ANSWER = 2
    ERROR = 3
    CANCEL = 4


class _Frame(msgspec.Struct, array_like=True, gc=False):
    """A frame with its values undecoded: a method's annotations, or the caller, say of which type they are."""

    kind: int
    number: int
    name: str
    values: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class _Method:
    """A method and the types of its arguments."""

    function: Callable[..., Any]
    kinds: tuple[Any, ...]

    @classmethod
    def of(cls, target: object, name: str) -> _Method:
        """The public method of that name, which takes annotated positional arguments. Raises AttributeError."""
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(target, name)
        hints = get_type_hints(function)
        return cls(function, tuple(hints[parameter] for parameter in inspect.signature(function).parameters))

    def __call__(self, values: list[msgspec.Raw]) -> Any:
        """The result, or a coroutine that comes to it."""
        pairs = zip(values, self.kinds, strict=True)
        return self.function(*(codec.decode(value, kind) for value, kind in pairs))


class Channel(asyncio.Protocol):
    """One end of a socket: calls the methods of the object at the other end, and answers with those of `target`.

    Methods that are coroutines run side by side; others run at once, in the order in which calls and notes come.

    Example: ``channel = await Channel.open("worker-1", connection, Driver())``, then
    ``await channel.call("add", 2, 3, result=int, deadline_s=5.0)``.
    """

    def __init__(self, name: str, target: object) -> None:
        self.name = name
        self._target = target
        self._methods: dict[str, _Method] = {}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Frame]] = {}
        self._working: dict[int, asyncio.Task[None]] = {}
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, name: str, connection: socket.socket, target: object) -> Channel:
        """Speak over a connected socket; `name` is what errors call the other end."""
        connection.setblocking(False)
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(name, target), sock=connection)
        return channel

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed.is_set()

    async def call(self, method: str, *arguments: object, result: TypeForm[T], deadline_s: float) -> T:
        """Call a method of the object at the other end.

        Waits for: the answer. Unblocked by: it, the other end's end, the deadline, cancellation.

        Raises:
            RemoteCallError: the method raised.
            ChannelClosedError: the other process ended.
            TimeoutError: no answer within `deadline_s`.
        """
        if not self._writable.is_set():
            await self._writable.wait()
        self._check_open()
        number, waiter = next(self._numbers), self._loop.create_future()
        self._waiting[number] = waiter
        timer = self._loop.call_later(deadline_s, _expire, waiter, f"{self.name}.{method}: no answer in {deadline_s} s")
        try:
            self._send(_Kind.CALL, number, method, arguments)
            frame = await waiter
        except (asyncio.CancelledError, TimeoutError):
            self._send(_Kind.CANCEL, number, "", ())
            raise
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
        if frame.kind == _Kind.ERROR:
            raise RemoteCallError(self.name, method, codec.decode(frame.values[0], Reply))
        return codec.decode(frame.values[0], result)

    def note(self, method: str, *arguments: object) -> None:
        """Tell the other end something that needs no answer; nothing happens once it is gone."""
        if not self.is_closed:
            self._send(_Kind.NOTE, next(self._numbers), method, arguments)

    async def ended(self) -> None:
        """Waits for: the other process's end. Unblocked by: that, or `close`."""
        await self._closed.wait()

    def close(self) -> None:
        """Send what is pending and hang up; safe to call twice."""
        if self._transport is not None and not self.is_closed:
            self._flush()
            self._transport.close()
            self.fail_pending()

    def fail_pending(self) -> None:
        """Nothing comes from the other end any more: end all that waits for it or is done for it."""
        self._closed.set()
        self._writable.set()
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(ChannelClosedError(f"{self.name} is gone"))
        for task in list(self._working.values()):
            task.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is ours."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end hung up."""
        self.fail_pending()

    def pause_writing(self) -> None:
        """The other end is slow: calls wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Take in whole frames, in order; what is left is the start of the next."""
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(received, start)[0]
            if len(received) < end:
                break
            self._take(codec.decode(bytes(memoryview(received)[begin:end]), _Frame))
            start = end
        if start:
            del received[:start]

    def _take(self, frame: _Frame) -> None:
        match frame.kind:
            case _Kind.CALL | _Kind.NOTE:
                self._do(frame)
            case _Kind.ANSWER | _Kind.ERROR:
                waiter = self._waiting.get(frame.number)
                if waiter is not None and not waiter.done():
                    waiter.set_result(frame)
            case _Kind.CANCEL if (task := self._working.get(frame.number)) is not None:
                task.cancel()

    def _do(self, frame: _Frame) -> None:
        """Call our method; what it raises is the other side's to handle."""
        try:
            method = self._methods.get(frame.name)
            if method is None:
                method = self._methods[frame.name] = _Method.of(self._target, frame.name)
            value = method(frame.values)
        except Exception as error:  # noqa: BLE001 - the caller's process is where errors are handled
            self._answer_error(frame, error)
            return
        if inspect.iscoroutine(value):
            self._working[frame.number] = self._loop.create_task(self._finish(frame, value))
        else:
            self._answer(frame, value)

    async def _finish(self, frame: _Frame, work: Coroutine[Any, Any, Any]) -> None:
        """Waits for: one of our coroutines. Unblocked by: it, or a cancellation by the other side or at its end."""
        try:
            self._answer(frame, await work)
        except Exception as error:  # noqa: BLE001 - the caller's process is where errors are handled
            self._answer_error(frame, error)
        finally:
            self._working.pop(frame.number, None)

    def _answer(self, frame: _Frame, value: object) -> None:
        if frame.kind == _Kind.CALL:
            self._send(_Kind.ANSWER, frame.number, "", (value,))

    def _answer_error(self, frame: _Frame, error: Exception) -> None:
        if frame.kind == _Kind.NOTE:
            _log.error("a note '%s' of %s could not be taken", frame.name, self.name, exc_info=error)
            return
        failure = error.failure if isinstance(error, EpisodeError) else None
        kind, trace, place = type(error).__name__, trace_of(error), place_of(error)
        reply = Reply(error=kind, message=str(error), trace=trace, place=place, failure=failure)
        self._send(_Kind.ERROR, frame.number, "", (reply,))

    def _send(self, kind: _Kind, number: int, name: str, values: tuple[object, ...]) -> None:
        """Queue a frame; all of one turn of the loop leave in one write."""
        data = codec.encode((int(kind), number, name, values))
        if self.is_closed:
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += (_LENGTH.pack(len(data)), data)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))

    def _check_open(self) -> None:
        if self.is_closed:
            raise ChannelClosedError(f"{self.name} is gone")


def _expire(waiter: asyncio.Future[_Frame], message: str) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError(message))
