"""The calling side of a process border: start a child, call it with deadlines, kill it for certain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentrl import codec
from agentrl.process.local_place import LocalPlace
from agentrl.process.outlet import Outlet
from agentrl.process.place import Place, PlacedProcess, ProcessLaunch
from agentrl.process.server import HEADER, Call, Reply
from agentrl.process.starting import tail
from agentrl.process.threads import run_in_thread
from agentrl.types.errors import AgentRLError

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
_EXIT_S = 2.0
_LARGE_BYTES = 1 << 16


class RemoteCallError(AgentRLError):
    """A method in another process raised; `error` is the exception's type name."""

    def __init__(self, name: str, method: str, reply: Reply) -> None:
        super().__init__(f"{name}.{method}: {reply.error}: {reply.message}")
        self.error, self.message, self.trace, self.place = reply.error, reply.message, reply.trace, reply.place
        self.failure = reply.failure


class ProcessDiedError(AgentRLError):
    """A child process ended while it was needed; the message carries the end of its log."""


class ChildProcess:
    """A Python child that serves one object, with its output in a log file, or where this process has its own.

    One call at a time, and what `tell` says beside it. A call that misses its deadline leaves the child in an unknown
    state, so the caller must `kill` it; `kill` takes the child's whole process group and always succeeds. A call that
    was given up goes on in the child; the next one waits for its end, and its answer is nobody's.

    Example: ``await ChildProcess.start("trainer-0", [*CHILD, "agentrl.trainer.rank"], log)``; the child
    finds the number of its socket as the last argument.
    """

    def __init__(self, name: str, process: PlacedProcess, log: Path | None) -> None:
        self.name, self.log = name, log
        self._process = process
        self._numbers = itertools.count()
        self._sending: asyncio.Task[None] | None = None
        self._coming: tuple[int, int] | None = None  # length and number of an answer whose rest is to be read
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._outlet: Outlet

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        log: Path | None,
        environment: dict[str, str] | None = None,
        python: str | Path | None = None,
        place: Place | None = None,
    ) -> ChildProcess:
        """Start ``python *argv FD`` in a process group of its own, on this machine or at a place.

        Raises:
            OSError: there is no process or no descriptor to be had.
            PlaceLostError: the place is gone.
        """
        launch = ProcessLaunch(
            name,
            tuple(argv),
            log=None if log is None else str(log.absolute()),
            environment=environment or {},
            python=None if python is None else str(python),
        )
        process = await (place or LocalPlace()).start(launch)
        child = cls(name, process, log)
        child._outlet = Outlet(process.connection)
        child._reader, child._writer = await asyncio.open_connection(sock=process.connection)
        return child

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._process.returncode is None

    async def call(self, method: str, *arguments: object, result: TypeForm[T], deadline_s: float) -> T:
        """Call a method of the child's object.

        Waits for: the child's reply. Unblocked by: the reply, the child's end, the deadline.

        Raises:
            RemoteCallError: the method raised.
            ProcessDiedError: the child ended.
            TimeoutError: no reply within `deadline_s`.
        """
        return await self.call_encoded(method, encode_call(method, arguments), result=result, deadline_s=deadline_s)

    async def call_encoded(self, method: str, request: bytes, result: TypeForm[T], deadline_s: float) -> T:
        """The same with a call that `encode_call` made; a large one is sent by a thread, while the loop goes on."""
        number = next(self._numbers)
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(HEADER.pack(len(request), number), request)
                reply = await self._reply_to(number)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._wait_for_end()
            raise ProcessDiedError(self.describe_end(method)) from None
        return _decode_reply(self.name, method, reply, result)

    async def tell(self, method: str, *arguments: object, deadline_s: float) -> None:
        """Call a method, also while another call is under way; its answer is nobody's. One that is gone hears nothing.

        Waits for: the call to be sent. Unblocked by: that, the child's end, the deadline.
        """
        request = encode_call(method, arguments)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._send(HEADER.pack(len(request), next(self._numbers)), request)

    async def _send(self, header: bytes, request: bytes) -> None:
        """Waits for: the child, until it has read all. Unblocked by: that, its end, or `kill`."""
        if self._sending is not None:  # of a call that was given up: what follows is not to come in its midst
            await asyncio.wait([self._sending])
        if len(request) > _LARGE_BYTES:
            sending = run_in_thread(f"send-{self.name}", lambda: self._outlet.send(header, request))
            self._sending = asyncio.create_task(sending)
            self._sending.add_done_callback(_note_error)
            await asyncio.shield(self._sending)
        else:
            self._writer.write(header + request)
            await self._writer.drain()

    async def _reply_to(self, number: int) -> bytes:
        """The answer to a call; those to calls that were given up come before it.

        Waits for: the child. Unblocked by: it, or its end; the caller sets the deadline.
        """
        while True:
            if self._coming is None:
                self._coming = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            size, answered = self._coming
            reply = await self._reader.readexactly(size)
            self._coming = None
            if answered == number:
                return reply

    async def _wait_for_end(self) -> None:
        """A process that dies closes its socket before its exit code can be had; a moment later it can."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await self._process.wait()

    def how_it_ended(self) -> str:
        """Of a child that has ended: by a signal, with an exit code, or with its place."""
        return self._process.how_it_ended()

    def describe_end(self, doing: str) -> str:
        """What a person needs to know about a child that ended: how, where, and its last words."""
        last_words = "its last words are above" if self.log is None else f"end of {self.log}:\n{tail(self.log)}"
        return f"process {self.name} ended ({self.how_it_ended()}) during {doing}; {last_words}"

    async def close(self, grace_s: float = 2.0) -> None:
        """Let the child end by itself for a moment, then kill it; safe to call twice."""
        self._hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        self.kill()

    def kill(self) -> None:
        """End the child and everything it started, at once unless a disk holds it; safe to call twice."""
        self._process.kill()
        self._hang_up()

    def _hang_up(self) -> None:
        self._writer.close()
        self._outlet.close()


def _note_error(sending: asyncio.Task[None]) -> None:
    """Of a call that was given up nobody hears that it could not be sent."""
    if not sending.cancelled():
        sending.exception()


def encode_call(method: str, arguments: tuple[object, ...]) -> bytes:
    """A call as it goes to a child."""
    return codec.encode(Call(method, [codec.encode(argument) for argument in arguments]))


def _decode_reply(name: str, method: str, data: bytes, result: TypeForm[T]) -> T:
    reply = codec.decode(data, Reply)
    if reply.error is not None:
        raise RemoteCallError(name, method, reply)
    return codec.decode(reply.value, result)
