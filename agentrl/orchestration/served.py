"""Servers of a run's environments that the run itself starts, on machines with room for them.

To whoever plays they are servers as a person would have started them: sessions outlive the worker that uses them, and
its node. A server that is lost is not replaced: the run goes on with those that are left, and once an environment has
none it goes on by itself from its last checkpoint, with new ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from agentrl import codec
from agentrl.orchestration.config import EnvironmentSection, RunConfig
from agentrl.process.parent import CHILD
from agentrl.process.place import Place, PlacedProcess, PlaceLostError, Places, ProcessLaunch, Role
from agentrl.process.starting import tail
from agentrl.serving.options import PlacedServer, ServerOptions, ServerReady, SessionLimits
from agentrl.types.errors import ConfigError

TOKEN_VARIABLE = "AGENTRL_SERVERS_TOKEN"
_MODULE = "agentrl.serving.placed"
_START_S, _END_S = 300.0, 60.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Server:
    environment: str
    url: str
    place: Place
    process: PlacedProcess
    control: asyncio.StreamWriter

    async def close(self) -> None:
        """Waits for: its end. Unblocked by: it, or a deadline."""
        self.control.close()
        try:
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        except TimeoutError:
            _log.warning("the server of '%s' at %s did not end in time and is killed", self.environment, self.url)
        await self.process.end()
        await self.place.close()


class EnvironmentServers:
    """The servers of the environments that a configuration places ``served``; `config` has them as remote ones."""

    def __init__(self, config: RunConfig, places: Places, logs: Path) -> None:
        self.config = config
        self._places, self._logs, self._token = places, logs, secrets.token_urlsafe()
        self._servers: list[_Server] = []

    @classmethod
    @asynccontextmanager
    async def started(cls, config: RunConfig, places: Places, logs: Path) -> AsyncIterator[EnvironmentServers]:
        """Servers that end with the block, within which processes that are started find their token.

        Waits for: room, and the environments. Unblocked by: these, or their deadlines.

        Raises:
            ConfigError: an environment cannot be served.
            PlaceLostError: there is no room, or a server was lost while it started.
        """
        servers = cls(config, places, logs)
        os.environ[TOKEN_VARIABLE] = servers._token
        try:
            await servers._start()
            yield servers
        finally:
            del os.environ[TOKEN_VARIABLE]
            await asyncio.gather(*(server.close() for server in servers._servers))

    async def run(self) -> None:
        """Waits for: the loss of an environment's last server. Unblocked by: it; never if there is none to lose.

        Raises:
            PlaceLostError: it is gone.
        """
        left = Counter(server.environment for server in self._servers)
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watches = [asyncio.create_task(self._watch(server, left)) for server in self._servers]
        try:
            await asyncio.gather(never, *watches)
        finally:
            for watch in watches:
                watch.cancel()

    async def _watch(self, server: _Server, left: Counter[str]) -> None:
        await server.process.wait()
        left[server.environment] -= 1
        lost = f"the server of '{server.environment}' at {server.url} ended ({server.process.how_it_ended()})"
        if not left[server.environment]:
            raise PlaceLostError(f"{lost}, and it was the last")
        _log.warning("%s; its sessions are lost, and %d servers are left", lost, left[server.environment])

    async def _start(self) -> None:
        """Raises ConfigError or PlaceLostError."""
        sections = {name: s for name, s in self.config.environments.items() if s.placement == "served"}
        starts = [(name, number) for name, section in sections.items() for number in range(section.num_servers)]
        started = await asyncio.gather(*(self._start_one(*start) for start in starts), return_exceptions=True)
        for error in (outcome for outcome in started if isinstance(outcome, BaseException)):
            raise error
        found = dict(self.config.environments)
        for name, section in sections.items():
            urls = tuple(server.url for server in self._servers if server.environment == name)
            remote = {
                "placement": "remote",
                "servers": urls,
                "token_variable": TOKEN_VARIABLE,
                "options": {},
                "num_servers": 1,
            }
            found[name] = section.model_copy(update=remote)
        self.config = self.config.model_copy(update={"environments": found})

    async def _start_one(self, environment: str, number: int) -> None:
        """Raises ConfigError or PlaceLostError."""
        name = f"server-{environment}-{number}"
        log, logs = (self._logs / f"{name}.log").absolute(), (self._logs / name).absolute()
        logs.mkdir(exist_ok=True)
        place = await self._places.take(Role.ENVIRONMENT, name)
        process: PlacedProcess | None = None
        try:
            process = await place.start(ProcessLaunch(name, (*CHILD, _MODULE), str(log)))
            reader, control = await asyncio.open_connection(sock=process.connection)
            options = self._options(self.config.environments[environment], environment, logs)
            control.write(codec.to_json(PlacedServer(options, place.host)) + b"\n")
            async with asyncio.timeout(_START_S):
                line = await reader.readline()
            ready = codec.from_json(line, ServerReady) if line else await self._ended(name, process, log)
            if ready.error is not None:
                raise ConfigError(f"environments.{environment}: {ready.error}")
        except BaseException as error:
            if process is not None:
                await process.end()
            await place.close()
            if isinstance(error, OSError):  # a deadline, too
                why = str(error) or f"not up in {_START_S:g} s"
                raise PlaceLostError(f"{name} could not be started: {why}") from error
            raise
        self._servers.append(_Server(environment, ready.url, place, process, control))

    async def _ended(self, name: str, process: PlacedProcess, log: Path) -> NoReturn:
        """Of a server that has hung up. Raises PlaceLostError."""
        await process.end()
        raise PlaceLostError(f"{name} ended at its start ({process.how_it_ended()}); end of {log}:\n{tail(log)}")

    def _options(self, section: EnvironmentSection, environment: str, logs: Path) -> ServerOptions:
        rollout, call_s = self.config.rollout, self.config.limits_of(environment).tool_s
        # Evaluations play beside training, and workers that were lost leave sessions behind for a while.
        limits = SessionLimits(most=4 * rollout.concurrency, call_s=call_s)
        options = {section.name: section.options}
        kind = self.config.sandbox.kind
        return ServerOptions(options, str(logs), self._token, limits=limits, drain_s=0.0, sandbox=kind)
