"""An environment of one short turn, or a few, with a coin for a judge, and ways to misbehave."""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from dataclasses import replace
from typing import Any

from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.testing.durable_environments import LastingOptions, LivingEnvironment
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task


class CoinOptions(ConfigModel):
    faults: tuple[str, ...] = ()
    every: int = 1
    is_flat: bool = False
    turns: int = 1
    step_s: float = 0.0
    score_s: float = 0.0
    first_waits_for: int = 0  # the task, counted from 0, whose start lets the first one go on
    rewards_cut: bool = False  # a reply cut short, which no environment is shown, by how many were judged before


_newest = 0  # of the tasks that were started in this process
_judged = 0  # episodes of this process


class Coin:
    """Rewards a reply by the checksum of its text: nothing to learn, but always something to train on.

    One reward of a hundred, since replies of a group that are all rewarded alike train nothing.
    """

    def __init__(self, options: CoinOptions, task: Task) -> None:
        place, is_well = divmod(task.ordinal, options.every)
        self._fault = options.faults[place % len(options.faults)] if options.faults and not is_well else ""
        self._task = task
        self._is_flat, self._rewards_cut = options.is_flat, options.rewards_cut
        self._waits_for = 0 if task.ordinal else options.first_waits_for
        self._turns_left = options.turns
        self._step_s, self._score_s = options.step_s, options.score_s
        self._reply = ""

    async def start(self) -> Opening:
        global _newest
        _newest = max(_newest, self._task.ordinal)
        return Opening((Message(Role.USER, f"count {self._task.ordinal}"),))

    async def step(self, action: Message) -> StepResult:
        self._reply += action.content
        self._turns_left -= 1
        if self._fault == "raise":
            raise RuntimeError("the database is gone")
        if self._fault == "hang":
            time.sleep(3600)  # noqa: ASYNC251 - to block the loop is the fault
        if self._fault == "crash":
            os._exit(3)
        while _newest < self._waits_for:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self._step_s)
        if self._turns_left:
            return StepResult((Message(Role.USER, f"{self._turns_left} more"),))
        return StepResult(is_done=True)

    async def score(self) -> Score:
        global _judged
        _judged += 1
        place = _judged  # of this episode: while it sleeps, others are judged
        await asyncio.sleep(self._score_s)
        rewards: dict[str, Any] = {"nan": float("nan"), "text": "1"}
        if self._is_flat:
            return Score(0.5)
        if self._rewards_cut and not self._reply:
            return Score(place % 101 / 100)
        return Score(rewards.get(self._fault, zlib.crc32(self._reply.encode()) % 101 / 100))

    async def close(self) -> None:
        return


class LivingCoin(LivingEnvironment):
    """A session on a server that outlives its worker, with a coin for a judge."""

    def __init__(self, options: LastingOptions, session: str | None = None, token: int = 0) -> None:
        super().__init__(options, session, token)
        self._reply = ""

    async def step(self, action: Message) -> StepResult:
        self._reply = action.content
        return await super().step(replace(action, tool_calls=()))

    async def score(self) -> Score:
        return Score(zlib.crc32(self._reply.encode()) % 101 / 100)


def sample_task(options: CoinOptions, split: Split, ordinal: int, seed: int) -> Task:
    return Task("coin", split, ordinal, {"seed": seed})


living_coin = EnvironmentDefinition(
    "living_coin",
    "A coin in a live session.",
    lambda options, split, ordinal, seed: Task("living_coin", split, ordinal, {"seed": seed}),
    lambda options, task: LivingCoin(options),
    LastingOptions,
    reattach_fenced=lambda options, task, handle, token: LivingCoin(options, handle, token),
)
coin = EnvironmentDefinition(
    "coin", "A coin.", sample_task, Coin, CoinOptions, placement="inline", is_deterministic=True
)
