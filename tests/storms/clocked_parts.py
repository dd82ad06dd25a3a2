"""Parts of a run that take their time by sleeping: an engine with continuous batching, an environment, a trainer.

The engine counts tokens one by one, as a real one steps; nothing is shared with the simulation of `agentrl.sizing`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import Field

from agentrl.types.batch import StepReport, TrainBatch
from agentrl.types.environment import StepResult
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import WeightSource
from agentrl_environments.sql import definition
from agentrl_environments.sql.environment import SqlEnvironment
from agentrl_environments.sql.tasks import SqlOptions
from tests.storms.simulation import TailEngine, TimedTrainer

_TAIL = 1.6449  # of a normal distribution's 95th percentile


@dataclass(frozen=True, slots=True)
class Setting:
    """What the parts take. A token takes ``alone_s + beside_s * n`` while n sequences are decoded.

    Replies have lognormal numbers of words of two tokens, `tail` times the median at the 95th percentile; an episode
    has `turns` replies, a call of the environment behind each but the last.
    """

    alone_s: float = 0.01
    beside_s: float = 0.0
    median_words: int = 10
    tail: float = 3.0
    turns: int = 3
    step_s: float = 0.0
    slots: int = 1000
    train_s: float = 0.2
    train_token_s: float = 0.0
    swap_s: float = 0.05
    scorer_s: float = 0.0


@dataclass(slots=True)
class _Part:
    wanted: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: int = 0


@dataclass(slots=True)
class ClockedEngine(TailEngine):
    """All replies get a token at once, again and again; how long that takes depends on their number."""

    setting: Setting = Setting()
    _parts: list[_Part] = field(default_factory=list)
    _ticking: asyncio.Task[None] | None = None

    async def swap(self, source: WeightSource, version: PolicyVersion) -> None:
        await asyncio.sleep(self.setting.swap_s)
        self.version = version

    async def _until_paused(self, rest: np.ndarray, seconds_per_token: float) -> np.ndarray:
        part = _Part(len(rest))
        self._parts.append(part)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())
        waits = [asyncio.create_task(event.wait()) for event in (part.ended, self._pause)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if part in self._parts:
            self._parts.remove(part)
        return rest if part.tokens >= part.wanted else rest[: part.tokens]

    async def _tick(self) -> None:
        """Waits for: the time of a token, while there are replies."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while self._parts:
            next_s += self.setting.alone_s + self.setting.beside_s * len(self._parts)
            await asyncio.sleep(next_s - loop.time())
            for part in self._parts:
                part.tokens += 1
            for part in [part for part in self._parts if part.tokens >= part.wanted]:
                part.ended.set()
                self._parts.remove(part)

    def _reply(self, session: str, conversation: Sequence[Message]) -> Message:
        turn = sum(m.role is Role.ASSISTANT for m in conversation)
        return reply(self.setting, session, turn)


def reply(setting: Setting, session: str, turn: int) -> Message:
    """What the script says in a turn of a session."""
    draw = random.Random(f"{session}/{turn}").gauss(0.0, math.log(setting.tail) / _TAIL)
    words = max(1, round(setting.median_words * math.exp(draw)))
    calls = (ToolCall("", "schema", {}),) if turn < setting.turns - 1 else ()
    return Message(Role.ASSISTANT, " ".join(["what"] * words), calls)


@dataclass(slots=True)
class ClockedTrainer(TimedTrainer):
    """Takes its time by the batch's sampled tokens."""

    setting: Setting = Setting()

    async def step(self, batch: TrainBatch) -> StepReport:
        await asyncio.sleep(self.setting.train_s + self.setting.train_token_s * batch.num_sampled_tokens)
        return StepReport(batch.version.next())


class SlowOptions(SqlOptions):
    """The SQL environment's, and how long its tools take."""

    step_s: float = Field(0.0, ge=0)
    """Seconds of a tool call."""
    slots: int = Field(1000, gt=0)
    """Tool calls at once, all instances together."""


class SlowSqlEnvironment(SqlEnvironment):
    """Sleeps before each tool call."""

    async def step(self, action: Message) -> StepResult:
        options = self.options
        assert isinstance(options, SlowOptions)
        if action.tool_calls and options.step_s:
            async with _slots(options.slots):
                await asyncio.sleep(options.step_s)
        return await super().step(action)


_in_loop: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def _slots(number: int) -> asyncio.Semaphore:
    """Those of the running loop."""
    return _in_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(number))


slow_sql = replace(definition, name="slow_sql", create=SlowSqlEnvironment, options=SlowOptions)
