"""Stands between clients and a server, and does to connections what a network does: breaks them, or delivers late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(eq=False)
class _Link:
    """One connection: both ends, and whether what the client has sent goes on."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    flows: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()
        self.flows.set()


class ConnectionProxy:
    """Forwards connections to one server."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._links: set[_Link] = set()
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def standing(cls, target: str) -> AsyncIterator[ConnectionProxy]:
        """A proxy for the server of a URL, until the block ends."""
        proxy = cls(target)
        async with await asyncio.start_server(proxy._take, "127.0.0.1", 0) as server:
            proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield proxy
            for link in list(proxy._links):
                link.abort()

    def break_one(self, rng: random.Random) -> bool:
        """Break one of the connections; False if there is none."""
        if self._links:
            rng.choice(list(self._links)).abort()
            return True
        return False

    def hold(self) -> list[asyncio.Event]:
        """Keep back what clients send over the present connections, until these events are set."""
        for link in self._links:
            link.flows.clear()
        return [link.flows for link in self._links]

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, ours)
        link.flows.set()
        self._links.add(link)
        with suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(_pump(reader, ours, link.flows), _pump(theirs, writer, None))
        self._links.discard(link)
        link.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event | None) -> None:
    """Forward what comes, late if it is held; its end is the end of the other side."""
    while data := await reader.read(2**16):
        if flows is not None:
            await flows.wait()
        writer.write(data)
        await writer.drain()
    if flows is not None:
        await flows.wait()
    writer.close()
