"""Tasks, sampled ahead of admission where their environments live, so that admission never waits for a sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from agentrl.types.task import Task

SampleTasks = Callable[[Sequence[int]], Awaitable[Sequence[Task]]]


class TaskSource(Protocol):
    """Gives the tasks of environments by their ordinals."""

    def get(self, environment: str, ordinal: int) -> Task | None:
        """The task, or None while it is on its way; then the listener hears of it."""

    def listen(self, on_arrival: Callable[[], Awaitable[None]]) -> None:
        """Call this whenever tasks have come."""


class TaskFeed:
    """Keeps some tasks of each environment ready, from the first that was asked for on.

    Example: ``feed.get("sql", 7)`` is None at first and makes `run` sample the `ahead` tasks from 7 on; once 7 is
    there, ``get`` gives it. Tasks that lie `ahead` behind it are forgotten.
    """

    def __init__(self, samplers: Mapping[str, SampleTasks], ahead: int = 32) -> None:
        self._samplers, self._ahead = dict(samplers), ahead
        self._tasks: dict[str, dict[int, Task]] = {name: {} for name in samplers}
        self._wanted: dict[str, set[int]] = {name: set() for name in samplers}
        self._is_wanted = {name: asyncio.Event() for name in samplers}
        self._on_arrival: Callable[[], Awaitable[None]] | None = None

    def get(self, environment: str, ordinal: int) -> Task | None:
        """The task if it is there; else it is sampled, and those behind it."""
        tasks = self._tasks[environment]
        missing = [n for n in range(ordinal, ordinal + self._ahead) if n not in tasks]
        if ordinal in missing or len(missing) > self._ahead // 2:
            self._wanted[environment].update(missing)
            self._is_wanted[environment].set()
        task = tasks.get(ordinal)
        if task is not None:
            for old in [n for n in tasks if n < ordinal - self._ahead]:
                del tasks[old]
        return task

    def listen(self, on_arrival: Callable[[], Awaitable[None]]) -> None:
        """Call this whenever tasks have come."""
        self._on_arrival = on_arrival

    async def run(self) -> None:
        """Sample what is wanted. Waits for: wishes, the samplers. Unblocked by: these, or cancellation.

        Raises:
            AgentRLError: an environment cannot sample its tasks.
        """
        async with asyncio.TaskGroup() as environments:
            for name in self._samplers:
                environments.create_task(self._sample(name), name=f"tasks-{name}")

    async def _sample(self, name: str) -> None:
        """Sample for one environment. Waits for: wishes. Unblocked by: `get`, or cancellation."""
        while True:
            await self._is_wanted[name].wait()
            self._is_wanted[name].clear()
            ordinals = sorted(self._wanted[name] - self._tasks[name].keys())
            self._wanted[name].clear()
            # The first episodes need not wait until a slow sampler has made all of their followers' tasks.
            size = 1
            while ordinals:
                part, ordinals = ordinals[:size], ordinals[size:]
                await self._sample_part(name, part)
                size *= 2

    async def _sample_part(self, name: str, ordinals: Sequence[int]) -> None:
        """Waits for: the sampler, which has a deadline. Unblocked by: its tasks."""
        tasks = await self._samplers[name](ordinals)
        self._tasks[name].update(zip(ordinals, tasks, strict=True))
        if self._on_arrival is not None:
            await self._on_arrival()
