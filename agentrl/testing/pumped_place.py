"""A place that behaves like one on another machine, for tests: bytes, news and orders come by way of tasks.

What a child and the run say to each other is carried between two sockets in pieces of odd sizes. That a process has
ended is known a little later than it has, and `kill` asks for the end without waiting for it. A place can be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

from agentrl.process.local_place import LocalPlace, LocalProcess
from agentrl.process.place import Place, PlaceLostError, ProcessLaunch, Role
from agentrl.process.ports import LOOPBACK

_SIZES = (1, 13, 4099, 65_521)
_READ_BYTES = 1 << 17
_END_S = 60.0


class PumpedProcess:
    """A child of this machine that is known by what tasks tell of it."""

    def __init__(self, inner: LocalProcess, connection: socket.socket | None) -> None:
        self._inner, self._connection = inner, connection
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.is_lost = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._inner.pid

    @property
    def connection(self) -> socket.socket:
        """The run's end of what is pumped."""
        assert self._connection is not None
        return self._connection

    @property
    def returncode(self) -> int | None:
        """What has been heard of its end."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Waits for: news of its end. Unblocked by: it, or the loss of the place."""
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """Send it a signal, later."""
        self._loop.call_soon(self._inner.signal, number)

    def kill(self) -> None:
        """End it and its group, later."""
        self._loop.call_soon(self._inner.kill)

    async def end(self) -> None:
        """Waits for: news of its end. Unblocked by: it, or a deadline."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.wait()

    async def running(self) -> str | None:
        """What its running mark names; of a lost place nobody knows."""
        return None if self.is_lost else await self._inner.running()

    def how_it_ended(self) -> str:
        """By a signal, with an exit code, or with its place."""
        return "its place is gone" if self.is_lost else self._inner.how_it_ended()

    def lose(self) -> None:
        """Nothing is heard of it any more, and it ends."""
        self.is_lost = True
        self.told(-signal.SIGKILL)
        self._inner.kill()

    def told(self, code: int) -> None:
        """How it ended is known, unless it was lost before."""
        if not self._ended.done():
            self._ended.set_result(code)

    async def watch(self) -> None:
        """Waits for: the end of the process. Unblocked by: it."""
        self.told(await self._inner.wait())


class PumpedPlace:
    """A place of this machine, as if there were a network between."""

    def __init__(self) -> None:
        self._inner = LocalPlace()
        self._processes: list[PumpedProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_lost = self.is_closed = False

    @property
    def host(self) -> str:
        """Loopback."""
        return LOOPBACK

    @property
    def node(self) -> str:
        """All are on this machine."""
        return LOOPBACK

    async def start(self, launch: ProcessLaunch) -> PumpedProcess:
        """Start a child. Raises OSError or PlaceLostError."""
        await asyncio.sleep(0)
        if self._is_lost:
            raise PlaceLostError(f"{launch.name} cannot be started: its place is gone")
        inner, ours = await self._inner.start(launch), None
        if launch.has_socket:
            ours, far = socket.socketpair()
            self._begin(_pump(inner.connection, far))
        process = PumpedProcess(inner, ours)
        self._processes.append(process)
        self._begin(process.watch())
        return process

    async def free_port(self) -> int:
        """A port that nobody listens on now."""
        return await self._inner.free_port()

    async def close(self) -> None:
        """End what still runs, and wait for what is still to be told."""
        self.is_closed = True
        for process in self._processes:
            await process.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    def lose(self) -> None:
        """The machine is gone, with all that ran there."""
        self._is_lost = True
        for process in self._processes:
            process.lose()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class PumpedPlaces:
    """Hands out pumped places, and keeps the newest of each name in `taken`."""

    def __init__(self) -> None:
        self.taken: dict[str, PumpedPlace] = {}

    @property
    def host(self) -> str:
        """Loopback."""
        return LOOPBACK

    @property
    def is_elastic(self) -> bool:
        """There is always room."""
        return False

    async def take(self, role: Role, name: str, team: str = "") -> PumpedPlace:
        """A place of its own."""
        place = self.taken[name] = PumpedPlace()
        return place

    async def gang(self, role: Role, names: Sequence[str]) -> list[Place]:
        """A place of its own for each."""
        return [await self.take(role, name) for name in names]

    async def beside(self, place: Place, name: str) -> PumpedPlace:
        """A place of its own."""
        return await self.take(Role.WORKER, name)

    async def watch(self) -> None:
        """Waits for: nothing. Unblocked by: cancellation."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Close those that were not."""
        for place in self.taken.values():
            await place.close()


async def _pump(one: socket.socket, other: socket.socket) -> None:
    """Waits for: bytes at either end, which go to the other. Unblocked by: the end of both."""
    with one, other:
        for end in (one, other):
            end.setblocking(False)
        await asyncio.gather(_carry(one, other), _carry(other, one))


async def _carry(source: socket.socket, target: socket.socket) -> None:
    """Waits for: bytes. Unblocked by: the end of the source, which the target is told, or that of the target."""
    loop, sizes = asyncio.get_running_loop(), itertools.cycle(_SIZES)
    with contextlib.suppress(OSError):  # an end that is gone takes no more
        while data := await loop.sock_recv(source, _READ_BYTES):
            rest = memoryview(data)
            while rest:
                size = next(sizes)
                await loop.sock_sendall(target, rest[:size])
                rest = rest[size:]
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
