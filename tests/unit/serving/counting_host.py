"""A table of sessions around environments that note what reaches them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentrl.envs.wire import Open
from agentrl.serving.board import Board
from agentrl.serving.options import SessionLimits
from agentrl.serving.table import SessionTable
from agentrl.types.environment import EnvironmentDescription, Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task

TASK = Task("counting", Split.TRAIN, 0)


@dataclass
class Counting:
    """An environment that notes what reaches it; a step waits until `goes_on` is set."""

    effects: list[str] = field(default_factory=list)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False
    restored: bytes | None = None

    async def start(self) -> Opening:
        return Opening((Message(Role.USER, "count"),))

    async def step(self, action: Message) -> StepResult:
        self.effects.append(action.content)
        await self.goes_on.wait()
        if action.content == "bad":
            raise ValueError("no such move")
        return StepResult((Message(Role.TOOL, f"{len(self.effects)}: {action.content}"),))

    async def score(self) -> Score:
        return Score(float(len(self.effects)))

    async def snapshot(self) -> bytes:
        return ",".join(self.effects).encode()

    async def close(self) -> None:
        self.is_closed = True


class Host:
    """Gives out environments whose steps do not wait, unless told otherwise."""

    description = EnvironmentDescription("counting")

    def __init__(self, waits: bool = False) -> None:
        self.made: list[Counting] = []
        self._waits = waits

    @asynccontextmanager
    async def open(self, task, origin=None):
        environment = Counting(restored=None if origin is None else origin.snapshot)
        if not self._waits:
            environment.goes_on.set()
        self.made.append(environment)
        try:
            yield environment
        finally:
            await environment.close()

    async def sample(self, split, seed, ordinals):
        return [Task("counting", split, ordinal) for ordinal in ordinals]

    async def close(self) -> None:
        pass


def table_of(host: Host, **limits) -> SessionTable:
    return SessionTable({"counting": host}, SessionLimits(**limits), Board(1))


async def opened(table: SessionTable, name: str = "open", token: int = 0) -> str:
    return (await table.answer(Open(id=name, environment="counting", task=TASK, token=token))).session
