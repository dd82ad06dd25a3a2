"""A command at work under bubblewrap: its processes from the first one to the end of the last."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import msgspec

from agentrl.sandbox.streams import gone
from agentrl.types.errors import Boundary, EpisodeError


class _Status(msgspec.Struct, rename="kebab"):
    """What bwrap says of a command: first the process, at its end the exit code."""

    child_pid: int | None = None
    exit_code: int | None = None


class RunningCommand:
    """A bwrap at work; the command does not begin before `release`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        status: asyncio.StreamReader,
        transport: asyncio.ReadTransport,
        block: int,
    ) -> None:
        self.process = process
        self._status, self._transport, self._block = status, transport, block
        self._first: int | None = None  # a descriptor of the command's first process

    @classmethod
    async def of(cls, process: asyncio.subprocess.Process, status: int, block: int) -> RunningCommand:
        """Over the descriptors of its status, and of what it waits for."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(status, "rb", 0)
        )
        return cls(process, reader, transport, block)

    async def pid(self) -> int:
        """The first process of the command's namespace, by our count. Raises EpisodeError if there is none."""
        line = await self._status.readline()
        found = msgspec.json.decode(line, type=_Status).child_pid if line else None
        if found is None:
            assert self.process.stderr is not None
            said = (await self.process.stderr.read(1000)).decode(errors="replace").strip()
            raise EpisodeError(Boundary.SANDBOX, "start", f"bwrap made no sandbox: {said or 'it said nothing'}")
        try:
            self._first = os.pidfd_open(found)
        except OSError as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found, signal.SIGKILL)
            raise EpisodeError(Boundary.SANDBOX, "start", f"the command's process cannot be held: {error}") from error
        return found

    def release(self) -> None:
        """Let the command begin."""
        os.write(self._block, b"1")

    async def exit_code(self) -> int | None:
        """The command's, once bwrap has ended; None if it was never started."""
        lines = (await self._status.read()).splitlines()
        codes = [msgspec.json.decode(line, type=_Status).exit_code for line in lines]
        return next((code for code in codes if code is not None), None)

    async def end(self) -> None:
        """End all processes of the command, if any are left; goes on when it is cancelled.

        Waits for: bwrap, and the command's first process, which is over once its namespace is empty. Unblocked by:
        these, since all get SIGKILL.
        """
        await asyncio.shield(asyncio.create_task(self._end(), name="bwrap-end"))

    async def _end(self) -> None:
        if self._first is None:
            # Alone bwrap's first process could be killed now, and what it has started would wait for ever.
            with contextlib.suppress(EpisodeError):
                await self.pid()
        if self._first is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await gone(self.process)
        else:
            await self._end_all(self._first)
        self._transport.close()
        os.close(self._block)

    async def _end_all(self, first: int) -> None:
        # Bwrap ends with its command, a moment before what that has left running.
        await _end_process(first)
        await gone(self.process)
        _forget(first)
        os.close(first)


async def _end_process(descriptor: int) -> None:
    """Kill a process, which need not be a child, and wait until it is over; `descriptor` is one of `os.pidfd_open`.

    Waits for: the end of the process, and of all in its namespace if it is the first there. Unblocked by: that, since
    it gets SIGKILL.
    """
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)


def _forget(orphan: int) -> None:
    """Take note of the end of a process that is this one's since its parent has ended.

    Until then the kernel counts it among the processes of its sandbox.
    """
    with contextlib.suppress(ChildProcessError):  # its parent had
        os.waitid(os.P_PIDFD, orphan, os.WEXITED | os.WNOHANG)
