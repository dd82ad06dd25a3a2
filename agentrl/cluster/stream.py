"""Bytes of a socket in pieces of bounded size, in both directions."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

PIECE_BYTES = 1 << 22
"""Where reading pauses until what has come is taken: about the most that one piece holds."""


class ByteStream(asyncio.Protocol):
    """One end of a socket.

    Example: ``stream = await ByteStream.open(connection)``, then ``await stream.take(5.0)`` gives what has come.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._has_ended = False
        self._news, self._drained = asyncio.Event(), asyncio.Event()
        self._drained.set()

    @classmethod
    async def open(cls, connection: socket.socket) -> ByteStream:
        """Take over a connected socket."""
        connection.setblocking(False)
        _, stream = await asyncio.get_running_loop().create_connection(cls, sock=connection)
        return stream

    async def take(self, limit_s: float | None, gather_s: float = 0.0) -> bytes | None:
        """What has come since the last time; empty if nothing came in time, None once nothing will come any more.

        Waits for: bytes, and for `gather_s` behind the first of them for more. Unblocked by: them, the other side's
        end, `close`, the limit.
        """
        if not self._pieces and not self._has_ended:
            try:
                async with asyncio.timeout(limit_s):
                    await self._news.wait()
            except TimeoutError:
                return b""
            if gather_s and not self._has_ended:
                await asyncio.sleep(gather_s)
        if not self._pieces:
            return None
        data = b"".join(self._pieces)
        self._pieces.clear()
        if self._num_bytes >= PIECE_BYTES and not self._has_ended:
            self._transport.resume_reading()
        self._num_bytes = 0
        if not self._has_ended:
            self._news.clear()
        return data

    async def give(self, data: bytes, limit_s: float | None) -> bool:
        """Send bytes; False if the other side has not read all in time, True also once it is gone.

        Waits for: the other side, until it has read all but what its kernel holds. Unblocked by: that, its end,
        `close`, the limit.
        """
        if data and not self._transport.is_closing():
            self._transport.write(data)
        try:
            async with asyncio.timeout(limit_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Send what is pending and hang up; safe to call twice."""
        self._end()
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Writing counts as done once the kernel has all of it."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        """Keep it until it is taken, and read no more once there is much."""
        self._pieces.append(data)
        is_first_too_many = self._num_bytes < PIECE_BYTES <= self._num_bytes + len(data)
        self._num_bytes += len(data)
        if is_first_too_many:
            self._transport.pause_reading()
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side hung up, or is gone."""
        self._end()

    def pause_writing(self) -> None:
        """The other side has not read all."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """It has."""
        self._drained.set()

    def _end(self) -> None:
        self._has_ended = True
        self._news.set()
        self._drained.set()
