"""The child's side of a process host: one environment at a time, whatever it does to this process."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Awaitable
from functools import cached_property
from typing import Any, TypeVar

import msgspec

import agentrl
from agentrl.config.base import ConfigModel
from agentrl.envs.abilities import attachable, running_programs, snapshotting
from agentrl.envs.definition import EnvironmentDefinition, load_environment
from agentrl.process.server import serve
from agentrl.protocols import Environment
from agentrl.types.environment import (
    EnvironmentDescription,
    Opening,
    Origin,
    Score,
    StepResult,
    check_opening,
    check_score,
    check_step,
)
from agentrl.types.message import Message
from agentrl.types.sandbox import Command, CommandResult
from agentrl.types.task import Split, Task

T = TypeVar("T")


class EnvironmentWorker:
    """Holds the environment of the current episode. Synchronous methods are as good as coroutines here."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._values = name, options
        self._definition: EnvironmentDefinition[ConfigModel]
        self._environment: Environment | None = None

    def wake(self) -> str:
        """Import the environment, before any other call; returns the version of agentrl here."""
        try:
            self._definition = load_environment(self._name)
        except Exception:
            traceback.print_exc(limit=-3)  # for the log, whose end the run's process shows
            raise
        return agentrl.__version__

    def describe(self) -> EnvironmentDescription:
        """What a run needs to know of the environment."""
        return self._definition.describe(self._options)

    def sample(self, split: Split, seed: int, ordinals: list[int]) -> list[Task]:
        """Tasks of a split in a run's order."""
        return self._definition.sample(self._options, split, seed, ordinals)

    async def create(self, task: Task, origin: Origin | None) -> None:
        """Make the environment of an episode."""
        self._environment = await self._definition.make(self._options, task, origin)

    async def start(self) -> Opening:
        """The environment's opening."""
        return check_opening(await _value(self._present().start()))

    async def step(self, action: Message) -> StepResult:
        """The environment's reaction."""
        return check_step(await _value(self._present().step(action)))

    async def score(self) -> Score:
        """The environment's verdict."""
        return check_score(await _value(self._present().score()))

    async def handle(self) -> str | None:
        """Names the live session."""
        return await _value(attachable(self._present()).handle())

    async def detach(self) -> None:
        """Leave the session alive."""
        await _end(attachable(self._present()).detach())

    async def outcome(self, step: int, effect_ids: list[str]) -> StepResult | None:
        """The result of a step that was dispatched to the session."""
        return await _value(attachable(self._present()).outcome(step, effect_ids))

    async def snapshot(self) -> bytes:
        """The whole state."""
        return await _value(snapshotting(self._present()).snapshot())

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """What a scaffold's program gives."""
        return await _value(running_programs(self._present()).run(command, effect_id))

    async def stop(self, effect_id: str) -> None:
        """End such a program; called beside `run`."""
        await _end(running_programs(self._present()).stop(effect_id))

    async def close(self) -> None:
        """Free the environment."""
        environment, self._environment = self._environment, None
        if environment is not None:
            await _end(environment.close())

    @cached_property
    def _options(self) -> ConfigModel:
        return self._definition.parse_options(self._values)

    def _present(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("no environment was created")
        return self._environment


async def _value(result: Awaitable[T] | T) -> T:
    return await result if inspect.isawaitable(result) else result


async def _end(result: Awaitable[None] | None) -> None:
    if inspect.isawaitable(result):
        await result


def main() -> None:
    """Entry of the child: ``python -m agentrl.envs.worker NAME OPTIONS_JSON FD``."""
    name, options, fd = sys.argv[1:]
    serve(EnvironmentWorker(name, msgspec.json.decode(options)), int(fd), beside=frozenset({"stop"}))


if __name__ == "__main__":
    main()
