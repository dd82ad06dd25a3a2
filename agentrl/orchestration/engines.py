"""Starts engine processes, or finds those that run, and knows when one has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.inference.client import EngineClient
from agentrl.inference.config import AttachedEngineConfig, ClientConfig
from agentrl.inference.ownership import check_swaps_in_place, release, take, wake
from agentrl.orchestration.commands import EngineLaunch, engine_command
from agentrl.process.place import Place, PlacedProcess, PlaceLostError, ProcessLaunch
from agentrl.process.starting import tail
from agentrl.types.errors import ConfigError, EngineError, EnginesLostError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode

_POLL_S = 0.05
_LET_GO_S = 3.0
_SAY_AFTER_S = 2.0
_SAY_EVERY_S = 30.0
_log = logging.getLogger(__name__)


class EngineProcess:
    """An engine that this run started, with its client."""

    def __init__(self, launch: EngineLaunch, process: PlacedProcess, client: EngineClient) -> None:
        self.client = client
        self._launch, self._process = launch, process

    @classmethod
    async def start(cls, launch: EngineLaunch, client: ClientConfig, place: Place) -> EngineProcess:
        """Start the process at a place and wait until it answers.

        Raises:
            ConfigError: it ended by itself while starting; carries the end of its log.
            EnginesLostError: it was killed while starting, or its place is gone.
            EngineError: it did not answer in time.
        """
        try:
            port = await place.free_port()
            process = await place.start(_process_launch(launch, port, place.host))
        except PlaceLostError as error:
            raise EnginesLostError(f"engine {launch.name} could not be started: {error}") from error
        url = f"http://{place.host}:{port}"
        calls = EngineClient(launch.name, url, client, launch.pause_mode, launch.token, launch.mark)
        engine = cls(launch, process, calls)
        try:
            await engine._wait_until_up(launch.log)
            if launch.pause_mode is PauseMode.IN_PLACE:
                await check_swaps_in_place(engine.client)
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
        await self._process.wait()
        log = self._launch.log
        return f"engine {self._launch.name} ended ({self._process.how_it_ended()}). End of {log}:\n{tail(log)}"

    async def close(self) -> None:
        """End the process and everything it started; safe to call twice."""
        await self._process.end()
        await self._process.wait()
        await self.client.close()

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
        """Waits for: health. Unblocked by: it, or the end of the process. Raises ConfigError, EnginesLostError."""
        while not await _succeeds(self.client.probe):
            if self._process.returncode is not None:
                words = f"engine {self._launch.name} did not start ({self._process.how_it_ended()}):\n{tail(log)}"
                # What somebody killed, or was lost with its place, starts elsewhere or another time.
                is_lost = self._process.returncode == -signal.SIGKILL
                raise EnginesLostError(words) if is_lost else ConfigError(words)
            await asyncio.sleep(_POLL_S)


def _process_launch(launch: EngineLaunch, port: int, host: str) -> ProcessLaunch:
    """Raises ConfigError."""
    (_, *argv), environment = engine_command(launch, port, host)
    log = str(launch.log.absolute())
    return ProcessLaunch(launch.name, tuple(argv), log, environment, has_socket=False)


@dataclass(frozen=True, slots=True)
class Attachment:
    """An engine that somebody else runs, and what a run needs to make it its own."""

    name: str
    url: str
    config: AttachedEngineConfig
    client: ClientConfig
    pause_mode: PauseMode
    version: PolicyVersion
    mark: str | None = None

    async def attach(self) -> EngineClient:
        """A client of the engine once it answers, after it was taken for this run and relabelled to its first version.

        Waits for: an answer. Unblocked by: it, or `start_s`, of which the log tells the progress.

        Raises:
            EngineError: it does not answer in time.
            EngineTakenError: it belongs to another run.
            ConfigError: it cannot do what the configuration asks for.
        """
        token = os.environ.get(self.config.token_variable) if self.config.token_variable else None
        engine = EngineClient(self.name, self.url, self.client, self.pause_mode, token, self.mark)
        try:
            await wait_for_answer(engine, self.config.start_s)
            if self.pause_mode is PauseMode.IN_PLACE:
                await check_swaps_in_place(engine)
        except BaseException:
            await engine.close()
            raise
        try:
            await take(engine, self.version, self.config.take_over)
            if await wake(engine):
                _log.warning(
                    "engine %s at %s had been left paused by whoever used it before; it generates again",
                    self.name, self.url,
                )  # fmt: skip
        except BaseException:
            await let_go(engine)
            raise
        return engine


def attachments(
    policy: str,
    config: AttachedEngineConfig,
    client: ClientConfig,
    pause_mode: PauseMode,
    version: PolicyVersion,
    mark: str | None = None,
) -> list[Attachment]:
    """One for each address of a policy's engines."""
    return [
        Attachment(f"{policy}-{number}", url, config, client, pause_mode, version, mark)
        for number, url in enumerate(config.urls)
    ]


async def let_go(engine: EngineClient) -> None:
    """Leave an engine to the next run, generating.

    One that does not answer has lost this run's mark and its pause, or keeps them: this run, resumed, takes it so.
    """
    with contextlib.suppress(EngineError, TimeoutError):
        async with asyncio.timeout(_LET_GO_S):
            await release(engine)
    await engine.close()


async def wait_for_answer(engine: EngineClient, start_s: float) -> None:
    """Until an engine that somebody else runs answers. Raises EngineError after `start_s`."""
    telling = asyncio.create_task(_tell_of_waiting(engine, start_s), name=f"tell-of-{engine.name}")
    try:
        async with asyncio.timeout(start_s):
            while not await _succeeds(engine.model_info):
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise EngineError(
            f"engine {engine.name} at {engine.url} has not answered for {start_s:g} s (engine.start_s = "
            f"{start_s:g}); start it there, or correct engine.urls"
        ) from None
    finally:
        telling.cancel()


async def _tell_of_waiting(engine: EngineClient, start_s: float) -> None:
    """Say what is waited for, and until when: a look at an engine may itself take long. Ends by cancellation."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.sleep(_SAY_AFTER_S)
    while True:
        waited_s = loop.time() - started
        _log.warning(
            "engine %s at %s does not answer; waiting for it since %.0f s, and for %.0f s more (engine.start_s = %g)",
            engine.name, engine.url, waited_s, max(0.0, start_s - waited_s), start_s,
        )  # fmt: skip
        await asyncio.sleep(_SAY_EVERY_S)


async def _succeeds(look: Callable[[], Awaitable[object]]) -> bool:
    try:
        await look()
    except EngineError:
        return False
    return True
