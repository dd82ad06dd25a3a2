"""Starts the gateway of a process with the first program that needs it: most runs have none, and pay nothing."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.process.ports import make_socket_folder
from agentrl.rollouts.programs import ProgramCalls
from agentrl.types.errors import ConfigError
from agentrl.types.program import GatewayAccess

if TYPE_CHECKING:
    from agentrl.gateway.server import GatewayServer

_PACKAGES = ("fastapi", "uvicorn", "openai", "anthropic")


def check_installed() -> None:
    """Raises ConfigError if a package that the gateway needs is not there. Imports none of them."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"programs need the gateway, and {', '.join(missing)} is not installed; install agentrl[gateway]"
        )


class LazyGateway:
    """The gateway of this process's episodes."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._server: GatewayServer | None = None
        self._folder: Path | None = None

    @asynccontextmanager
    async def admit(self, calls: ProgramCalls) -> AsyncIterator[GatewayAccess]:
        """Answer the calls of an episode within the block; those in flight end with it.

        Waits for: the server, if this is the first. Unblocked by: it. Raises ConfigError if it cannot be had.
        """
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
        with self._server.admit(calls) as access:
            yield access

    async def close(self) -> None:
        """Answer nobody any more; safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> GatewayServer:
        # The SDKs' types take seconds to import, in which the episodes of this process go on.
        try:
            await asyncio.to_thread(importlib.import_module, "agentrl.gateway.server")
            from agentrl.gateway.server import GatewayServer
        except ImportError as error:
            raise ConfigError(f"programs need the gateway: {error}; install agentrl[gateway]") from error
        self._folder = make_socket_folder("agentrl-gateway-")
        self._folder.chmod(0o711)  # sandboxes under other user ids come to the socket, and list nothing
        server = GatewayServer(self._folder / "socket")
        try:
            await server.start()
        except OSError as error:
            raise ConfigError(f"the gateway cannot listen at {self._folder}: {error}") from error
        return server
