"""Stands between programs and a server, and cuts connections: before a call arrives, within its answer, behind it."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from urllib.parse import urlsplit

_CALL = b"POST "
_MOST_BYTES = 3000


class Cut(StrEnum):
    """Where a connection ends: the call never arrives, its answer never does, or a part of it."""

    BEFORE = "before"
    AFTER = "after"
    WITHIN = "within"


class CuttingProxy:
    """Forwards connections to one server, and resets some; `cuts` counts them."""

    def __init__(self, target: str, rng: random.Random, share: float) -> None:
        self._target, self._rng, self._share = urlsplit(target), rng, share
        self.cuts: Counter[Cut] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def standing(cls, target: str, rng: random.Random, share: float) -> AsyncIterator[CuttingProxy]:
        """A proxy for the server of a URL, until the block ends; it cuts so great a share of all calls."""
        proxy = cls(target, rng, share)
        async with await asyncio.start_server(proxy._take, "127.0.0.1", 0) as server:
            proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield proxy
            for task in proxy._tasks:
                task.cancel()

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer), name="forward")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(self._target.hostname, self._target.port)
        link = _Link(self, writer, ours)
        try:
            with suppress(OSError):
                await asyncio.gather(link.forward_calls(reader), link.forward_answers(theirs))
        finally:
            for side in (writer, ours):
                side.close()

    def choose(self) -> Cut | None:
        """What becomes of the next call."""
        return self._rng.choice(list(Cut)) if self._rng.random() < self._share else None

    def choose_size(self) -> int:
        """Bytes of an answer that pass."""
        return self._rng.randrange(1, _MOST_BYTES)


class _Link:
    """One connection, and what becomes of the call that is under way on it."""

    def __init__(self, proxy: CuttingProxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._cut: Cut | None = None
        self._left = 0

    async def forward_calls(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(2**16):
            if data.startswith(_CALL):
                self._cut, self._left = self._proxy.choose(), self._proxy.choose_size()
            if self._cut is Cut.BEFORE:
                self._reset(Cut.BEFORE)
                return
            self._server.write(data)
            await self._server.drain()
        with suppress(RuntimeError):  # closed by then
            self._server.write_eof()  # at once, and not behind the client's next call

    async def forward_answers(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(2**16):
            if self._cut is Cut.AFTER:
                self._reset(Cut.AFTER)
                return
            is_last = self._cut is Cut.WITHIN and len(data) > self._left
            self._client.write(data[: self._left] if is_last else data)
            self._left -= len(data)
            await self._client.drain()
            if is_last:
                self._reset(Cut.WITHIN)
                return
        self._client.close()

    def _reset(self, cut: Cut) -> None:
        """End both sides at once, as a network does that is gone; where a call never arrives, the client's alone.

        A reset would tell the server that the answer before was lost, which the client has heard.
        """
        self._proxy.cuts[cut] += 1
        for writer in (self._client,) if cut is Cut.BEFORE else (self._client, self._server):
            inner: socket.socket = writer.get_extra_info("socket")
            inner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
