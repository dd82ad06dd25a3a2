"""The part of a place that is on a node: an actor that starts children there, and passes on what they say.

A child is this process's own, started as on one machine, and ends with it. Calls that wait answer every few seconds, if
only that there is nothing to tell, so that a caller knows of a node that is silent. Calls of one kind for one child
come one after the other: the next is made when the last was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

from agentrl import codec
from agentrl.cluster.nodes import Node, own_host, own_node
from agentrl.cluster.stream import ByteStream
from agentrl.process.local_place import LocalPlace, LocalProcess
from agentrl.process.place import ProcessLaunch
from agentrl.process.ports import free_port

SIGN_OF_LIFE_S = 5.0
"""After which a call that waits answers without anything to tell."""
_GATHER_S = 0.002  # a call costs more than a frame: those of two milliseconds travel in one


@dataclass(frozen=True, slots=True)
class Started:
    """A child that runs as `pid`; or, with `pid` 0, why the system refused it."""

    pid: int
    error_number: int = 0
    error: str = ""


@dataclass(slots=True)
class _Child:
    process: LocalProcess
    end: asyncio.Task[int]
    stream: ByteStream | None


class ProcessActor:
    """Children of one place; `pid` says which.

    The working folder is the run's, if its node has that folder, since recipes may name files below it.
    """

    def __init__(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._place = LocalPlace()
        self._children: dict[int, _Child] = {}

    async def node(self) -> Node:
        """The node that this is on."""
        return own_node()

    async def free_port(self) -> int:
        """A port of this node that nobody listens on now."""
        return free_port(own_host())

    async def start(self, encoded: bytes) -> Started:
        """Start a child, given a `ProcessLaunch`."""
        launch = codec.decode(encoded, ProcessLaunch)
        try:
            process = await self._place.start(launch)
        except OSError as error:
            return Started(0, error.errno or 0, f"{error.strerror}: {error.filename or launch.name}")
        stream = await ByteStream.open(process.connection) if launch.has_socket else None
        end = asyncio.create_task(process.wait())
        self._children[process.pid] = _Child(process, end, stream)
        return Started(process.pid)

    async def send(self, pid: int, data: bytes) -> bool:
        """Pass bytes to a child; False if it has not read them yet. Waits for: it. Unblocked by: it, or seconds."""
        return await self._stream(pid).give(data, SIGN_OF_LIFE_S)

    async def receive(self, pid: int) -> bytes | None:
        """What a child has sent; None at the end. Waits for: it. Unblocked by: it, or seconds, which gives nothing."""
        return await self._stream(pid).take(SIGN_OF_LIFE_S, _GATHER_S)

    async def hang_up(self, pid: int) -> None:
        """Close the socket of a child."""
        self._stream(pid).close()

    async def ended(self, pid: int) -> int | None:
        """How a child ended, as `subprocess` says. Waits for: its end. Unblocked by: it, or seconds, which is None."""
        end = self._children[pid].end
        await asyncio.wait([end], timeout=SIGN_OF_LIFE_S)
        return end.result() if end.done() else None

    async def end(self, pid: int) -> None:
        """Kill a child and its group. Waits for: its end. Unblocked by: that, or seconds."""
        await self._children[pid].process.end()

    async def signal(self, pid: int, number: int) -> None:
        """Send a child a signal."""
        self._children[pid].process.signal(number)

    async def running(self, pid: int) -> str | None:
        """What a child's running mark names."""
        return await self._children[pid].process.running()

    def _stream(self, pid: int) -> ByteStream:
        stream = self._children[pid].stream
        assert stream is not None
        return stream
