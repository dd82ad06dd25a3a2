"""Starts engine processes on this machine, or finds those that run, and knows when one has died."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig, ClientConfig, EmbeddedEngineConfig
from agentrl.process.remote import tail
from agentrl.types.errors import ConfigError, EngineError
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What an engine process of a policy is started with."""

    policy: str
    name: str
    model: Path
    version: PolicyVersion
    config: EmbeddedEngineConfig
    is_deterministic: bool
    logs: Path


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
        port = _free_port()
        arguments = ["engine", str(launch.model), "--port", str(port), "--weight-version", str(launch.version)]
        arguments.append("--attended")
        arguments += ["--threads", str(launch.config.threads)]
        arguments += ["--deterministic"] if launch.is_deterministic else []
        arguments += [word for key, value in launch.config.args.items() for word in _option(key, value)]
        log = launch.logs / f"{launch.name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "agentrl.cli.main",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(launch.config.threads)},
            )
        url = f"http://127.0.0.1:{port}"
        engine = cls(launch, process, EngineClient(launch.name, url, client, publish.pause_mode))
        try:
            await engine._wait_until_up(log)
        except BaseException:
            await engine.close()
            raise
        return engine

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
        """Waits for: an answer. Unblocked by: it, or the end of the process, which raises ConfigError."""
        while not await _answers(self.client):
            if self._process.returncode is not None:
                code = self._process.returncode
                raise ConfigError(f"engine {self._launch.name} did not start (exit code {code}):\n{tail(log)}")
            await asyncio.sleep(_POLL_S)

    def _describe_end(self, code: int) -> str:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        log = self._launch.logs / f"{self._launch.name}.log"
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
            while not await _answers(engine):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise EngineError(
            f"no engine answers at {engine.url} within {start_s:g} s; start it, or correct engine.urls"
        ) from None


async def _answers(client: EngineClient) -> bool:
    try:
        await client.model_info()
    except EngineError:
        return False
    return True


def _option(key: str, value: Any) -> list[str]:
    """An option as the command line takes it. Example: ``prefill_tokens, 512`` gives ``--prefill-tokens 512``."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
