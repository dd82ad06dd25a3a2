"""A child on another machine as a `PlacedProcess`: its bytes and its end come by calls of an actor."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Coroutine
from typing import Any

from agentrl.cluster.calls import ActorCalls
from agentrl.cluster.stream import ByteStream
from agentrl.process.place import PlaceLostError

_END_S = 30.0


class RayProcess:
    """A child of a `ProcessActor`.

    Whoever speaks with the child has one end of a socket of this machine, and two tasks carry what comes out of the
    other end: one call at a time in each direction, so that bytes stay in order, and no more than a piece or two of
    them are on the way. The end of the child, of its actor or of its node reads as the end of that socket.
    """

    def __init__(self, calls: ActorCalls, pid: int) -> None:
        self._calls, self._pid = calls, pid
        self._connection: socket.socket | None = None
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._watch())

    @classmethod
    async def of(cls, calls: ActorCalls, pid: int, has_socket: bool) -> RayProcess:
        """A child that the actor has started."""
        process = cls(calls, pid)
        if has_socket:
            process._connection, far = socket.socketpair()
            stream = await ByteStream.open(far)
            process._spawn(process._carry_there(stream))
            process._spawn(process._carry_here(stream))
        return process

    @property
    def pid(self) -> int:
        """Process id on its node."""
        return self._pid

    @property
    def connection(self) -> socket.socket:
        """Our end of its socket."""
        assert self._connection is not None
        return self._connection

    @property
    def returncode(self) -> int | None:
        """Exit code, or the signal that ended it below 0; None while nothing is known of its end."""
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        """Waits for: the end of the process. Unblocked by: it, or the loss of its place."""
        return await asyncio.shield(self._end)

    def signal(self, number: int) -> None:
        """Send it a signal, a moment later."""
        self._spawn(self._tell("signal", number))

    def kill(self) -> None:
        """End it and its group, a moment later."""
        self._spawn(self._tell("end"))

    async def end(self) -> None:
        """The same. Waits for: its end. Unblocked by: it, the loss of its place, a deadline."""
        await self._tell("end")
        await asyncio.wait([self._end], timeout=_END_S)

    async def running(self) -> str | None:
        """What its running mark names; nothing is known of it once the place is lost."""
        try:
            mark: str | None = await self._calls.call("running", self._pid)
        except PlaceLostError:
            return None
        return mark

    def how_it_ended(self) -> str:
        """By a signal, with an exit code, or with its place."""
        code = self.returncode
        if self._calls.lost is not None and code == -signal.SIGKILL:
            return self._calls.lost
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    async def _watch(self) -> None:
        """Waits for: the process's end. Unblocked by: it, or the loss of its place."""
        code: int | None = None
        while code is None:
            try:
                code = await self._calls.call("ended", self._pid)
            except PlaceLostError:
                code = -signal.SIGKILL
        self._end.set_result(code)

    async def _carry_there(self, stream: ByteStream) -> None:
        """Waits for: what is to go to the child, and for the child. Unblocked by: either's end, or the place's."""
        try:
            while (data := await stream.take(None)) is not None:
                while not await self._calls.call("send", self._pid, data):
                    data = b""  # the actor has it, and the child has not read all of it yet
            await self._calls.call("hang_up", self._pid)
        except PlaceLostError:
            stream.close()

    async def _carry_here(self, stream: ByteStream) -> None:
        """Waits for: what the child says, and for whoever reads it. Unblocked by: either's end, or the place's."""
        try:
            while (data := await self._calls.call("receive", self._pid)) is not None:
                await stream.give(data, None)
        except PlaceLostError:
            pass  # the end of the stream says so
        stream.close()

    async def _tell(self, method: str, *arguments: object) -> None:
        """Call a method that has nothing to say; with the place, the process is gone as well."""
        try:
            await self._calls.call(method, self._pid, *arguments)
        except PlaceLostError:
            return

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
