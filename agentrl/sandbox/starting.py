"""Starts the keeper of a machine's sandboxes, and ends it with all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl import codec
from agentrl.process.local_place import LocalPlace
from agentrl.process.place import Place, PlacedProcess, ProcessLaunch
from agentrl.process.ports import name_socket_folder
from agentrl.process.starting import tail
from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.keeper import KeeperCounts, KeeperReady, KeeperSpec
from agentrl.sandbox.table import COUNTED
from agentrl.sandbox.wire import SOCKET_VARIABLE
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError

MODULE = "agentrl.sandbox.keeper"
_APART = "agentrl.process.apart"
_START_S, _END_S = 180.0, 90.0
# numpy's threads would keep the keeper from entering namespaces of its own.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_log = logging.getLogger(__name__)


class KeeperEndedError(ConfigError):
    """A keeper ended while it started, and has not said why."""


class SandboxKeeper:
    """A keeper, of this machine, or at a place of its own; it is started once an environment turns out to need it."""

    def __init__(
        self, config: SandboxConfig, label: str, socket: Path, log: Path | None, place: Place | None = None
    ) -> None:
        self._config, self._label, self._log = config, label, log
        self.socket, self.place = socket, place or LocalPlace()
        self._argv = ("-m", MODULE) if place is None else ("-m", _APART, MODULE)
        self._process: PlacedProcess | None = None
        self._control: asyncio.StreamWriter | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._counts: dict[str, int] = {}

    @property
    def pid(self) -> int:
        """Process id of the keeper, which has been started."""
        assert self._process is not None
        return self._process.pid

    async def start_for(self, environments: Iterable[EnvironmentDescription]) -> None:
        """Start it if one of them needs sandboxes. Raises ConfigError if there can be no such sandboxes here."""
        if any(environment.needs_sandbox for environment in environments):
            await self.start()

    async def start(self) -> None:
        """Start it.

        Waits for: the backend. Unblocked by: it, or three minutes. Raises ConfigError, which says what to do, and what
        `Place.start` raises.
        """
        log = None if self._log is None else str(self._log.absolute())
        self._process = await self.place.start(ProcessLaunch("sandboxes", self._argv, log, _ONE_THREAD))
        reader, self._control = await asyncio.open_connection(sock=self._process.connection)
        spec = KeeperSpec(self._config.model_dump(mode="json"), str(self.socket), self._label, self.place.host)
        self._control.write(codec.to_json(spec) + b"\n")
        try:
            async with asyncio.timeout(_START_S):
                line = await reader.readline()
        except TimeoutError:
            raise ConfigError(f"sandbox '{self._config.kind}' was not ready within {_START_S:g} s") from None
        if not line:
            said = "its last words are above" if self._log is None else f"end of {self._log}:\n{tail(self._log)}"
            await self._process.end()
            how = self._process.how_it_ended()
            raise KeeperEndedError(f"the keeper of '{self._config.kind}' sandboxes ended at its start ({how}); {said}")
        error = codec.from_json(line, KeeperReady).error
        if error is not None:
            raise ConfigError(error)
        self._counts = dict.fromkeys(COUNTED, 0)
        self._hearing = asyncio.create_task(self._hear(reader), name="sandbox-counts")

    def metrics(self) -> dict[str, float]:
        """What was counted since it was started; nothing of one that was not."""
        return {f"sandbox/{name}_total": float(count) for name, count in self._counts.items()}

    async def ended(self) -> str:
        """Waits for: the end of the keeper, which was started. Unblocked by: it. Says how it ended."""
        assert self._process is not None
        await self._process.wait()
        return self._process.how_it_ended()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Take in what is counted. Waits for: the keeper. Unblocked by: its end."""
        while line := await reader.readline():
            self._counts = codec.from_json(line, KeeperCounts).counts

    async def close(self) -> None:
        """End it with all sandboxes; safe to call twice.

        Waits for: their end. Unblocked by: it, or a minute and a half.
        """
        process, self._process = self._process, None
        if process is None:
            return
        if self._hearing is not None:
            self._hearing.cancel()
        if self._control is not None:
            self._control.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            _log.warning("the keeper of sandboxes did not end within %g s and is killed", _END_S)
        await process.end()


@asynccontextmanager
async def sandboxes(config: SandboxConfig, label: str, log: Path | None = None) -> AsyncIterator[SandboxKeeper]:
    """A keeper that is not started yet; processes that are started within the block will find it.

    Where this process is of a run that has a keeper, the block is about that one, which is started already.
    """
    if SOCKET_VARIABLE in os.environ:
        yield _Another(config, label, Path(os.environ[SOCKET_VARIABLE]), log)
        return
    # The keeper makes it: a run that needs none and is killed leaves nothing behind.
    folder = name_socket_folder("agentrl-keeper-")
    os.environ[SOCKET_VARIABLE] = str(folder / "socket")
    keeper = SandboxKeeper(config, label, folder / "socket", log)
    try:
        yield keeper
    finally:
        del os.environ[SOCKET_VARIABLE]
        await keeper.close()
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def running_keeper(config: SandboxConfig, label: str, log: Path | None = None) -> AsyncIterator[KeeperHost]:
    """The sandboxes of a keeper of one's own, for the block. Raises ConfigError if there can be none here."""
    async with sandboxes(config, label, log) as keeper:
        await keeper.start()
        yield KeeperHost.of_run()


class _Another(SandboxKeeper):
    """The keeper that a process further up has started, and ends."""

    async def start(self) -> None:
        """It runs."""
