"""What a sandbox without a network may reach all the same: allowed addresses through a proxy, and a gateway.

Both are ports of the sandbox's own loopback, on which the keeper listens: it makes the sockets inside the command's
network namespace, and carries what comes to them. There is no other way out, since there is no other interface.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from agentrl.sandbox import mounts
from agentrl.sandbox.relay import CONNECT_S, Relay, Serve, carry_both, to_unix_socket
from agentrl.types.sandbox import GATEWAY_URL_VARIABLE, Command, SandboxSpec

_LOOPBACK = "127.0.0.1,localhost"
_PROXY_PORT, _GATEWAY_PORT = 3128, 3129


class SandboxNetwork:
    """The ways out of one sandbox, open while a command runs."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._allowed = frozenset(spec.allow)
        self._relay = Relay()

    def environment_of(self, command: Command) -> Mapping[str, str]:
        """Variables that tell a command of them."""
        proxy, gateway = (f"http://127.0.0.1:{port}" for port in (_PROXY_PORT, _GATEWAY_PORT))
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        variables = dict.fromkeys(names, proxy) if self._allowed else {}
        return {**variables, **(gateway_variables(gateway) if command.gateway else {})}

    async def begin(self, pid: int, command: Command) -> None:
        """Listen in the network of a command's process. Raises OSError."""
        if self._allowed:
            await self._listen(pid, _PROXY_PORT, self._serve_proxy)
        if command.gateway is not None:
            await self._listen(pid, _GATEWAY_PORT, to_unix_socket(command.gateway))

    def end(self) -> None:
        """Listen no more, and cut what is being carried."""
        self._relay.end()

    async def _listen(self, pid: int, port: int, serve: Serve) -> None:
        # Of any address: there is no other interface than loopback, which the process may have yet to bring up.
        listener = mounts.in_network_of(pid, lambda: socket.create_server(("", port)))
        await self._relay.listen(listener, serve)

    async def _serve_proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of HTTP's CONNECT; anything else is refused, so that no address is reached unchecked."""
        async with asyncio.timeout(CONNECT_S):
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
            async with asyncio.timeout(CONNECT_S):
                other = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await carry_both((reader, writer), other)


def gateway_variables(url: str, without_proxy: str = "") -> Mapping[str, str]:
    """Variables that tell programs of a gateway on their loopback, which they then reach without a proxy.

    `without_proxy` names what else they are to reach so.
    """
    hosts = f"{without_proxy},{_LOOPBACK}" if without_proxy else _LOOPBACK
    return {GATEWAY_URL_VARIABLE: url, "NO_PROXY": hosts, "no_proxy": hosts}
