"""Environments in this process: fast, and only for those whose every call is short."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from agentrl.envs.abilities import WholeEnvironment
from agentrl.envs.definition import EnvironmentDefinition, Options
from agentrl.protocols import DurableEnvironment, Environment
from agentrl.types.environment import Origin
from agentrl.types.errors import Boundary, EpisodeError, boundary, deadline
from agentrl.types.task import Task

_log = logging.getLogger(__name__)


class InlineHost:
    """Makes environments on the caller's event loop."""

    def __init__(self, definition: EnvironmentDefinition[Options], options: Options, close_s: float) -> None:
        self._make = partial(definition.make, options)
        self._close_s = close_s
        self.recovery = definition.recovery

    @asynccontextmanager
    async def open(self, task: Task, origin: Origin | None = None) -> AsyncIterator[DurableEnvironment]:
        """An environment for one episode. Raises EpisodeError if it cannot be made."""
        with boundary(Boundary.ENVIRONMENT, "create"):
            environment = self._make(task, origin)
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
