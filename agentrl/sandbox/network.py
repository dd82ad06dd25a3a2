"""What a sandbox without a network may reach all the same: allowed addresses through a proxy, and a gateway.

Both are ports of the sandbox's own loopback, on which the keeper listens: it makes the sockets inside the command's
network namespace, and carries what comes to them. There is no other way out, since there is no other interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from agentrl.sandbox import mounts
from agentrl.types.sandbox import SandboxSpec

_PROXY_PORT, _GATEWAY_PORT = 3128, 3129
_CONNECT_S, _CHUNK_BYTES = 30.0, 65536
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class SandboxNetwork:
    """The ways out of one sandbox, open while a command runs."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._allowed, self._gateway = frozenset(spec.allow), spec.gateway
        self._servers: list[asyncio.Server] = []
        self._carrying: set[asyncio.Task[None]] = set()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that tell programs of them."""
        proxy, gateway = (f"http://127.0.0.1:{port}" for port in (_PROXY_PORT, _GATEWAY_PORT))
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy") if self._allowed else ()
        return {**dict.fromkeys(names, proxy), **({"AGENTRL_GATEWAY": gateway} if self._gateway else {})}

    async def begin(self, pid: int) -> None:
        """Listen in the network of a process. Raises OSError."""
        if self._allowed:
            await self._listen(pid, _PROXY_PORT, self._serve_proxy)
        if self._gateway is not None:
            await self._listen(pid, _GATEWAY_PORT, self._serve_gateway)

    def end(self) -> None:
        """Listen no more, and cut what is being carried."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task in self._carrying:
            task.cancel()

    async def _listen(self, pid: int, port: int, serve: _Serve) -> None:
        listener = mounts.in_network_of(pid, lambda: socket.create_server(("127.0.0.1", port)))
        self._servers.append(await asyncio.start_server(lambda r, w: self._begin(serve(r, w), w), sock=listener))

    def _begin(self, work: Coroutine[Any, Any, None], writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_closing(work, writer), name="sandbox-connection")
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _serve_gateway(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._gateway is not None
        async with asyncio.timeout(_CONNECT_S):
            other = await asyncio.open_unix_connection(self._gateway)
        await _carry_both((reader, writer), other)

    async def _serve_proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of HTTP's CONNECT; anything else is refused, so that no address is reached unchecked."""
        async with asyncio.timeout(_CONNECT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.decode("latin-1").partition(" ")
        target = rest.partition(" ")[0]
        if method != "CONNECT" or target not in self._allowed:
            known = ", ".join(sorted(self._allowed))
            body = f"{method} {target} is not allowed; by CONNECT this sandbox reaches {known}".encode()
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body))
            writer.write(body)
            await writer.drain()
            return
        host, _, port = target.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_S):
                other = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await _carry_both((reader, writer), other)


async def _closing(work: Coroutine[Any, Any, None], writer: asyncio.StreamWriter) -> None:
    try:
        # A peer that goes away, or says nothing that is HTTP, ends its connection and nothing else.
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await work
    finally:
        writer.close()


async def _carry_both(one: _Streams, other: _Streams) -> None:
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
