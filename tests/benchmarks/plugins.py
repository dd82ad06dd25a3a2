"""Environments of the benchmarks, named as ``tests.benchmarks.plugins:NAME``."""

from __future__ import annotations

import dataclasses
import random

from agentrl.types.environment import Score
from agentrl.types.task import Split, Task
from agentrl_environments.sql import definition as sql
from agentrl_environments.sql.environment import SqlEnvironment
from agentrl_environments.sql.tasks import SqlOptions

_RESERVOIR_SIZE = 512
_FIRST_SUCCESS = 0.28  # as often as the demo's clumsy expert is right


class ShuffledRewards:
    """Hands every episode the true reward of some earlier one, so that rewards say nothing about behaviour.

    The reservoir is full from the start. One that fills with a run's first rewards pays for behaviour after all: short
    wrong episodes end first, so these would draw from wrong ones alone, and long right ones from more.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._earlier = [float(place < _FIRST_SUCCESS * _RESERVOIR_SIZE) for place in range(_RESERVOIR_SIZE)]

    def exchange(self, reward: float) -> float:
        """Put a reward in and draw another: the distribution stays, the connection is lost."""
        place = self._rng.randrange(_RESERVOIR_SIZE)
        drawn, self._earlier[place] = self._earlier[place], reward
        return drawn


class ShuffledSql(SqlEnvironment):
    """The SQL environment with shuffled rewards in training and true ones on held-out tasks."""

    rewards = ShuffledRewards(0)

    def __init__(self, options: SqlOptions, task: Task) -> None:
        super().__init__(options, task)
        self._is_train = task.split is Split.TRAIN

    async def score(self) -> Score:
        true = await super().score()
        if not self._is_train or true.reward is None:
            return true
        return Score(self.rewards.exchange(true.reward), true.metrics)


class CoinSql(SqlEnvironment):
    """The SQL environment with a coin for a judge, so that even a policy of noise has something to train on."""

    coin = random.Random(0)

    async def score(self) -> Score:
        return Score(float(self.coin.random() < 0.5))


shuffled_sql = dataclasses.replace(sql, name="shuffled_sql", create=ShuffledSql)
coin_sql = dataclasses.replace(sql, name="coin_sql", create=CoinSql)
