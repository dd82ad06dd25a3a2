"""Ports of a loopback, from which connections are carried somewhere else for as long as a command runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

CONNECT_S = 30.0
"""For who listens at the other end to take a connection."""
_CHUNK_BYTES = 65536
_BACKLOG = 1024  # an agent may begin many calls at once
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Relay:
    """Listens, and serves each connection by itself; a connection may be silent for as long as it likes."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket, serve: Serve) -> None:
        """Serve what comes to a socket. Raises OSError."""
        self._servers.append(
            await asyncio.start_server(lambda r, w: self._begin(serve(r, w), w), sock=listener, backlog=_BACKLOG)
        )

    def end(self) -> None:
        """Listen no more, and cut what is being carried."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task in self._serving:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None], writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_closing(work, writer), name="sandbox-connection")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)


def to_unix_socket(path: str) -> Serve:
    """Carries connections to a unix socket; those that nobody takes there end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_S):
            other = await asyncio.open_unix_connection(path)
        await carry_both((reader, writer), other)

    return serve


async def carry_both(one: Streams, other: Streams) -> None:
    """Carry bytes both ways. Waits for: the end of both. Unblocked by: these, or the command's end."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_carry(one[0], other[1]))
            group.create_task(_carry(other[0], one[1]))
    except* OSError:
        pass
    finally:
        other[1].close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _closing(work: Coroutine[Any, Any, None], writer: asyncio.StreamWriter) -> None:
    try:
        # A peer that goes away, or says nothing that is HTTP, ends its connection and nothing else.
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await work
    finally:
        writer.close()
