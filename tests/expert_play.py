"""What a scripted expert earns without a policy between it and the environment."""

from __future__ import annotations

import random
from statistics import mean
from typing import Any

from agentrl.envs.definition import EnvironmentDefinition
from agentrl.types.task import Split

MOST_TURNS = 24


async def mean_reward(
    definition: EnvironmentDefinition[Any], options: Any, expert: str, count: int, split: Split = Split.TRAIN
) -> float:
    """Mean reward of an expert over the first tasks of a split."""
    rewards = []
    for ordinal in range(count):
        task = definition.sample_task(options, split, ordinal, 0)
        environment = definition.create(options, task)
        messages = list((await environment.start()).messages)
        for _ in range(MOST_TURNS):
            draws = random.Random(f"{expert}-{ordinal}")
            act = definition.experts[expert].act(options, task, messages, draws)
            result = await environment.step(act)
            messages += [act, *result.messages]
            if result.is_done:
                break
        rewards.append((await environment.score()).reward)
        await environment.close()
    return mean(rewards)
