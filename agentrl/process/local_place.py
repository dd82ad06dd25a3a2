"""The machine of this process as a place: what is started there are its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.process.place import Place, ProcessLaunch, Role
from agentrl.process.ports import LOOPBACK, free_port
from agentrl.process.running_mark import make_mark, read_mark
from agentrl.process.starting import how_it_ended, kill_group, spawn, spawn_alone
from agentrl.process.threads import run_in_thread


class LocalProcess:
    """A child of this process: a `PlacedProcess` over `subprocess.Popen`."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket | None = None, mark: int | None = None
    ) -> None:
        self._process, self._connection, self._mark = process, connection, mark
        self._ran: str | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def connection(self) -> socket.socket:
        """Our end of its socket."""
        assert self._connection is not None
        return self._connection

    @property
    def returncode(self) -> int | None:
        """Exit code, or the signal that ended it below 0; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Waits for: the end of the process. Unblocked by: it. Whoever cancels it leaves a thread until then."""
        code = self._process.poll()
        return code if code is not None else await run_in_thread(f"wait-{self.pid}", self._process.wait)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it and its group. Waits for: its end, which a disk alone can delay. Unblocked by: it, or seconds."""
        kill_group(self._process)
        self._release_mark()

    async def end(self) -> None:
        """The same in a thread."""
        await run_in_thread(f"kill-{self.pid}", lambda: kill_group(self._process))
        self._release_mark()

    async def running(self) -> str | None:
        """What its running mark names."""
        return self._ran if self._mark is None else read_mark(self._mark)

    def how_it_ended(self) -> str:
        """By a signal, or with an exit code."""
        return how_it_ended(self._process)

    def _release_mark(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            self._ran = read_mark(mark)
            os.close(mark)


class LocalPlace:
    """The machine of this process, with which its children end."""

    @property
    def host(self) -> str:
        """Loopback: whoever reaches what listens here is on this machine."""
        return LOOPBACK

    @property
    def node(self) -> str:
        """The same."""
        return LOOPBACK

    async def start(self, launch: ProcessLaunch) -> LocalProcess:
        """Start a child. Raises OSError."""
        return _start(launch)

    async def free_port(self) -> int:
        """A port that nobody listens on now."""
        return free_port(self.host)

    async def close(self) -> None:
        """Nothing is kept for it."""


class LocalPlaces:
    """Everything runs on this machine, and shares all that it has."""

    @property
    def host(self) -> str:
        """Loopback's address."""
        return LOOPBACK

    @property
    def is_elastic(self) -> bool:
        """There is always room."""
        return False

    async def take(self, role: Role, name: str, team: str = "") -> LocalPlace:
        """The place."""
        return LocalPlace()

    async def gang(self, role: Role, names: Sequence[str]) -> list[Place]:
        """The same place for all of them."""
        place = LocalPlace()
        return [place] * len(names)

    async def beside(self, place: Place, name: str) -> LocalPlace:
        """The place."""
        return LocalPlace()

    async def watch(self) -> None:
        """Waits for: nothing, for this machine does not go. Unblocked by: cancellation."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing is kept."""


def _start(launch: ProcessLaunch) -> LocalProcess:
    mark = make_mark() if launch.has_mark else None
    try:
        with contextlib.nullcontext() if launch.log is None else Path(launch.log).open("ab") as output:
            argv = launch.argv if mark is None else (*launch.argv, str(mark))
            descriptors = () if mark is None else (mark,)
            settings = argv, output, launch.environment, descriptors, launch.python or sys.executable
            if not launch.has_socket:
                return LocalProcess(spawn_alone(*settings), None, mark)
            process, connection = spawn(*settings)
    except BaseException:
        if mark is not None:
            os.close(mark)
        raise
    return LocalProcess(process, connection, mark)
