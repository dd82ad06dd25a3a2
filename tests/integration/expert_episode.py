"""Plays an episode of an environment as its expert; run by an interpreter that may have no more than the base install.

``python expert_episode.py NAME`` starts a worker by the same interpreter and prints the reward.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.definition import load_environment
from agentrl.envs.hosting import build_host
from agentrl.protocols import EnvironmentHost
from agentrl.types.task import Split


async def play_expert(host: EnvironmentHost, name: str) -> float | None:
    """The reward of the first held-out task."""
    definition = load_environment(name)
    options = definition.parse_options({})
    task = definition.sampler(options, Split.HELDOUT, 0)(0)
    act = definition.expert("expert").act
    async with host.open(task) as environment:
        messages = list((await environment.start()).messages)
        is_done = False
        while not is_done:
            messages.append(act(options, task, messages, random.Random(0)))
            result = await environment.step(messages[-1])
            messages += result.messages
            is_done = result.is_done
        return (await environment.score()).reward


async def _main(name: str) -> None:
    with tempfile.TemporaryDirectory() as logs:
        host = await build_host(EnvironmentConfig(name=name), 30.0, Path(logs))
        try:
            print(await play_expert(host, name))
        finally:
            await host.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
