"""Several servers of one environment: which one gets the next session, and what is done while none takes it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.connection import Address, ServerConnection, ServerUnreachableError, websocket_url
from agentrl.envs.wire import Describe, Open, Opened, Sample, ServerBusyError
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.task import Task

T = TypeVar("T")
_SET_ASIDE_S = 5.0
_PAUSE_S = 0.2
_log = logging.getLogger(__name__)


def server_addresses(config: EnvironmentConfig) -> list[Address]:
    """Where an environment's servers are. Raises ConfigError if a URL is none, or the token's variable is empty."""
    token = None
    if config.token_variable is not None:
        token = os.environ.get(config.token_variable, "").strip()
        if not token:
            raise ConfigError(
                f"environment.token_variable: the variable {config.token_variable} is not set; put the content of the "
                "servers' --token-file into it"
            )
    for url in config.servers:
        websocket_url(url)
    return [Address(url.rstrip("/"), token) for url in config.servers]


@dataclass(slots=True)
class _Server:
    """One server as it was last seen: how many sessions it still takes, and until when it is not asked."""

    address: Address
    free: int = 1
    aside_until_s: float = 0.0
    idle: list[ServerConnection] = field(default_factory=list)


class ServerPool:
    """Servers of one environment and the connections to them; a connection serves one session at a time.

    `counts` has how often a session was refused by a server, how often one was waited for, and how many connections
    were lost and made anew; what there is to count is logged at the end.
    """

    def __init__(self, addresses: list[Address]) -> None:
        self.counts: Counter[str] = Counter()
        self._servers = {address.url: _Server(address) for address in addresses}

    def connection(self, url: str) -> ServerConnection:
        """A connection to one of the servers, to be given back. Raises EpisodeError (kind lost) for another."""
        server = self._servers.get(url)
        if server is None:
            known = ", ".join(self._servers)
            message = f"a session lives at {url}, which is not among environment.servers: {known}"
            raise EpisodeError(Boundary.ENVIRONMENT, "lost", message)
        return server.idle.pop() if server.idle else ServerConnection(server.address, self.counts)

    def give_back(self, connection: ServerConnection) -> None:
        """Keep a connection for the next session."""
        self._servers[connection.address.url].idle.append(connection)

    async def describe(self, name: str, deadline_s: float) -> EnvironmentDescription:
        """What all servers that answer say of an environment.

        Waits for: these. Unblocked by: them, or the deadline of each.

        Raises:
            ConfigError: none answers, one is no such server or lacks the environment, or two do not say the same.
        """
        found: dict[str, EnvironmentDescription] = {}
        unreachable: list[str] = []
        for url, server in self._servers.items():
            connection = self.connection(url)
            try:
                server.free = (await connection.open()).free
                found[url] = await connection.call(Describe(id="describe", environment=name), deadline_s)
            except ServerUnreachableError as error:
                unreachable.append(f"{url} does not answer ({error})")
                server.aside_until_s = time.monotonic() + _SET_ASIDE_S
            except EpisodeError as error:
                raise ConfigError(f"environment '{name}' at {url}: {error.failure.message}") from error
            finally:
                self.give_back(connection)
        if not found:
            raise ConfigError(
                f"environment '{name}': {'; '.join(unreachable)}; start its server with `agentrl env serve {name}`"
            )
        for message in unreachable:
            _log.warning("environment '%s': %s; the others go on without it", name, message)
        return _agreed(name, found)

    async def sample(self, call: Sample, deadline_s: float) -> list[Task]:
        """Tasks, by any server that answers. Raises EpisodeError."""

        async def attempt(connection: ServerConnection) -> list[Task]:
            tasks: list[Task] = await connection.call(call, deadline_s, patience_s=0.0)
            return tasks

        connection, tasks = await self._on_any(attempt, deadline_s)
        self.give_back(connection)
        return tasks

    async def open_session(self, call: Open, deadline_s: float) -> tuple[ServerConnection, str]:
        """A new session on the server with the most room: the connection to it, and its handle.

        Waits for: room on any of them. Unblocked by: that, or the deadline.

        Raises:
            EpisodeError: its environment cannot be made; or kind ``busy``, ``lost`` if no server took it in time.
        """

        async def attempt(connection: ServerConnection) -> str:
            # Where the connection is lost, the call is sent again to the same process: it may have opened the session.
            placed = msgspec.structs.replace(call, worker=(await connection.open()).worker)
            opened: Opened = await connection.call(placed, deadline_s, patience_s=0.0)
            self._servers[connection.address.url].free = opened.free
            return opened.session

        return await self._on_any(attempt, deadline_s)

    def close(self) -> None:
        """Close the connections that are not in use; safe to call twice."""
        if self.counts:
            told = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
            _log.warning("environment servers %s: %s", ", ".join(self._servers), told)
            self.counts.clear()
        for server in self._servers.values():
            for connection in server.idle:
                connection.drop()
            server.idle.clear()

    async def _on_any(
        self, attempt: Callable[[ServerConnection], Awaitable[T]], deadline_s: float
    ) -> tuple[ServerConnection, T]:
        """What the first server gives that takes the attempt, and the connection to it."""
        until = time.monotonic() + deadline_s
        while True:
            refusals = []
            for server in self._by_room():
                connection = self.connection(server.address.url)
                try:
                    return connection, await attempt(connection)
                except (EpisodeError, ServerUnreachableError, ConfigError) as error:
                    self.give_back(connection)
                    refusals.append(self._refused(server, error))
                except BaseException:
                    self.give_back(connection)
                    raise
            if time.monotonic() >= until:
                raise refusals[0]
            self.counts["waits"] += 1
            await asyncio.sleep(_PAUSE_S)

    def _by_room(self) -> list[_Server]:
        now = time.monotonic()
        return sorted(self._servers.values(), key=lambda server: (server.aside_until_s > now, -server.free))

    def _refused(self, server: _Server, error: EpisodeError | ServerUnreachableError | ConfigError) -> EpisodeError:
        """Note that a server took nothing, so that the others are asked first. Raises what no other would do better."""
        self.counts["refused"] += 1
        if isinstance(error, ServerBusyError):
            server.free, server.aside_until_s = 0, time.monotonic() + error.retry_after_s
            return error
        if isinstance(error, EpisodeError) and error.failure.kind != "lost":
            raise error
        if server.aside_until_s < time.monotonic():
            _log.warning("environment server %s is set aside: %s", server.address.url, error)
        server.aside_until_s = time.monotonic() + _SET_ASIDE_S
        if isinstance(error, EpisodeError):
            return error
        return EpisodeError(Boundary.ENVIRONMENT, "lost", f"environment server {server.address.url}: {error}")


def _agreed(name: str, found: Mapping[str, EnvironmentDescription]) -> EnvironmentDescription:
    """What all servers say. Raises ConfigError if two do not say the same."""
    (first, description), *others = found.items()
    for url, other in others:
        if other != description:
            raise ConfigError(
                f"environment '{name}' is not the same at {first} and {url}: {description} and {other}; start both "
                "servers with the same packages and --options"
            )
    return description
