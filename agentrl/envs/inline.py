"""Environments in this process: fast, and only for those whose every call is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentrl.envs.abilities import WholeEnvironment
from agentrl.envs.definition import EnvironmentDefinition, Options
from agentrl.process.threads import run_in_thread
from agentrl.protocols import DurableEnvironment, Environment
from agentrl.types.environment import Origin
from agentrl.types.errors import Boundary, EpisodeError, boundary, deadline
from agentrl.types.task import Split, Task

_log = logging.getLogger(__name__)


class InlineHost:
    """Makes environments on the caller's event loop."""

    def __init__(self, definition: EnvironmentDefinition[Options], options: Options, close_s: float) -> None:
        self._definition, self._options = definition, options
        self._close_s = close_s
        self.description = definition.describe(options)
        self._sampling = asyncio.Lock()

    async def sample(self, split: Split, seed: int, ordinals: Sequence[int]) -> list[Task]:
        """Tasks of a split in a run's order, made by a thread: episodes go on meanwhile."""
        async with self._sampling:
            with boundary(Boundary.ENVIRONMENT, "sample"):
                return await run_in_thread(
                    f"sample-{self._definition.name}",
                    lambda: self._definition.sample(self._options, split, seed, ordinals),
                )

    @asynccontextmanager
    async def open(self, task: Task, origin: Origin | None = None) -> AsyncIterator[DurableEnvironment]:
        """An environment for one episode. Raises EpisodeError if it cannot be made."""
        with boundary(Boundary.ENVIRONMENT, "create"):
            environment = await self._definition.make(self._options, task, origin)
        try:
            yield WholeEnvironment(environment)
        finally:
            await self._close(environment)

    async def _close(self, environment: Environment) -> None:
        """Free an environment; the episode's outcome stands even if that fails."""
        try:
            async with deadline("environment.close", self._close_s):
                with boundary(Boundary.ENVIRONMENT, "close"):
                    await environment.close()
        except EpisodeError as error:
            _log.warning("environment could not be closed: %s", error)

    async def close(self) -> None:
        """Nothing is kept between episodes."""
