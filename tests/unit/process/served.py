"""An object for process borders, served with ``python -m`` or in this process."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.process.server import serve
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.task import Split, Task


@dataclass(frozen=True)
class Column:
    values: np.ndarray
    name: str = ""


class Calculator:
    """Its methods do what any object's might."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, left: int, right: int) -> int:
        self.calls += 1
        return left + right

    async def double(self, column: Column) -> Column:
        await asyncio.sleep(0)
        return Column(column.values * 2, column.name)

    def rename(self, task: Task, split: Split) -> Task:
        return Task(task.environment, split, task.ordinal, task.payload)

    def count(self) -> int:
        return self.calls

    def fail(self) -> None:
        raise ValueError("seven is not allowed")

    def fail_episode(self) -> None:
        raise EpisodeError(Boundary.ENVIRONMENT, "reward", "reward is nan")

    def block(self) -> None:
        time.sleep(3600)

    def wait(self, begun: str, may_end: str) -> int:
        """41, once another file is there."""
        Path(begun).touch()
        for _ in range(12_000):
            if Path(may_end).exists():
                return 41
            time.sleep(0.01)
        raise TimeoutError(may_end)

    async def hold(self, begun: str) -> str:
        """What `let_go` says, which is called meanwhile."""
        self.held: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        Path(begun).touch()
        return await asyncio.wait_for(self.held, 300)

    async def let_go(self, word: str) -> None:
        self.calls += 1
        self.held.set_result(word)

    def die(self) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)

    def _secret(self) -> int:
        return 1


if __name__ == "__main__":
    serve(Calculator(), int(sys.argv[-1]), beside=frozenset({"let_go"}))
