"""Starts engine processes on this machine, or finds those that run, and knows when one has died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig, ClientConfig
from agentrl.orchestration.commands import EngineLaunch, engine_command
from agentrl.process.parent import attended_environment
from agentrl.process.ports import free_port
from agentrl.process.remote import tail
from agentrl.types.errors import ConfigError, EngineError
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig

_POLL_S = 0.05


class EngineProcess:
    """An engine that this run started, with its client."""

    def __init__(self, launch: EngineLaunch, process: asyncio.subprocess.Process, client: EngineClient) -> None:
        self.client = client
        self._launch, self._process = launch, process

    @classmethod
    async def start(cls, launch: EngineLaunch, client: ClientConfig, publish: PublishConfig) -> EngineProcess:
        """Start the process and wait until it answers.

        Raises:
            ConfigError: it ended by itself while starting; carries the end of its log.
            EngineError: it did not answer in time.
        """
        port = free_port()
        command, environment = engine_command(launch, port)
        with launch.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **attended_environment(), **environment},
            )
        url = f"http://127.0.0.1:{port}"
        engine = cls(launch, process, EngineClient(launch.name, url, client, publish.pause_mode))
        try:
            await engine._wait_until_up(launch.log)
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._process.pid

    async def ended(self) -> str:
        """Waits for: the end of the process. Unblocked by: it. Says how it ended."""
        return self._describe_end(await self._process.wait())

    async def close(self) -> None:
        """End the process and everything it started; safe to call twice."""
        await self.client.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        await self._process.wait()

    async def _wait_until_up(self, log: Path) -> None:
        start_s = self._launch.config.start_s
        try:
            async with asyncio.timeout(start_s):
                await self._poll_until_up(log)
        except TimeoutError:
            raise EngineError(
                f"engine {self._launch.name} did not answer within {start_s:g} s; see {log}, or raise engine.start_s"
            ) from None

    async def _poll_until_up(self, log: Path) -> None:
        """Waits for: health. Unblocked by: it, or the end of the process, which raises ConfigError."""
        while not await _succeeds(self.client.probe):
            if self._process.returncode is not None:
                code = self._process.returncode
                raise ConfigError(f"engine {self._launch.name} did not start (exit code {code}):\n{tail(log)}")
            await asyncio.sleep(_POLL_S)

    def _describe_end(self, code: int) -> str:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        log = self._launch.log
        return f"engine {self._launch.name} ended ({how}). End of {log}:\n{tail(log)}"


async def attach_engines(
    policy: str, config: AttachedEngineConfig, client: ClientConfig, publish: PublishConfig, version: PolicyVersion
) -> list[EngineClient]:
    """Clients of engines that run already, relabelled to the run's first version.

    Raises:
        EngineError: one does not answer in time.
    """
    token = os.environ.get(config.token_variable) if config.token_variable else None
    engines = []
    for number, url in enumerate(config.urls):
        engine = EngineClient(f"{policy}-{number}", url, client, publish.pause_mode, token)
        await wait_for_answer(engine, config.start_s)
        await engine.relabel(version)
        engines.append(engine)
    return engines


async def wait_for_answer(engine: EngineClient, start_s: float) -> None:
    """Until an engine that somebody else runs answers. Raises EngineError after `start_s`."""
    try:
        async with asyncio.timeout(start_s):
            while not await _succeeds(engine.model_info):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise EngineError(
            f"no engine answers at {engine.url} within {start_s:g} s; start it, or correct engine.urls"
        ) from None


async def _succeeds(look: Callable[[], Awaitable[object]]) -> bool:
    try:
        await look()
    except EngineError:
        return False
    return True
