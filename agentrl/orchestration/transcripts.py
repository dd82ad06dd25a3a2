"""Experts' episodes, played through the same session and scaffold as a policy's: exact to the token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Generic

from agentrl.envs.definition import EnvironmentDefinition, Options
from agentrl.gateway.starting import LazyGateway
from agentrl.orchestration.config import SOLE_AGENT
from agentrl.protocols import EnvironmentHost, Scaffold
from agentrl.rollouts.episode_log import NoJournal
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.scripted import ScriptedEngine
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import StalledError
from agentrl.types.generation import Sampling
from agentrl.types.message import Message
from agentrl.types.task import Limits, Split

_AT_ONCE = 64


class Teacher(Generic[Options]):
    """Plays episodes as one of an environment's experts, who acts as every agent."""

    def __init__(
        self,
        definition: EnvironmentDefinition[Options],
        options: Options,
        environments: EnvironmentHost,
        scaffold: Scaffold,
        limits: Limits,
    ) -> None:
        self._definition, self._options = definition, options
        self._environments, self._scaffold, self._limits = environments, scaffold, limits

    async def play(
        self,
        expert: str,
        chat: ChatFormat,
        numbers: Sequence[int],
        seed: int,
        split: Split = Split.TRAIN,
        on_episode: Callable[[int], None] = lambda done: None,
    ) -> list[Episode]:
        """One episode of each task, by its number in a run's order; all with a score.

        Raises:
            StalledError: an expert's episode failed, which is a fault of environment or expert.
            ConfigError: there is no such expert, or no task.
        """
        act = self._definition.expert(expert).act
        sample_task = self._definition.sampler(self._options, split, seed)
        tasks = {f"{expert}-{n}": sample_task(n) for n in numbers}

        def script(session: str, messages: Sequence[Message]) -> Message:
            task = tasks[session.split("/")[1]]
            return act(self._options, task, messages, random.Random(session))

        gateway = LazyGateway()
        runner = EpisodeRunner(
            dict.fromkeys(
                self._definition.agents or (SOLE_AGENT,),
                Player("teacher", ScriptedEngine(chat, script), chat, Sampling()),
            ),
            self._scaffold,
            self._environments,
            Verifier(self._limits.tool_s),
            NoJournal(),
            self._limits,
            gateway,
        )
        tickets = [Ticket(name, task, n, 0, 0, seed) for n, (name, task) in enumerate(tasks.items())]
        try:
            episodes = await _play_all(runner, tickets, on_episode)
        finally:
            await gateway.close()
        failed = next((e for e in episodes if e.failure is not None), None)
        if failed is not None:
            raise StalledError(f"episode {failed.episode_id} of expert '{expert}' failed: {failed.failure}")
        return episodes


async def _play_all(
    runner: EpisodeRunner, tickets: Sequence[Ticket], on_episode: Callable[[int], None]
) -> list[Episode]:
    episodes: list[Episode] = []
    for start in range(0, len(tickets), _AT_ONCE):
        playing = (runner.run(runner.open(ticket), _nothing) for ticket in tickets[start : start + _AT_ONCE])
        episodes += await asyncio.gather(*playing)
        on_episode(len(episodes))
    return episodes


async def _nothing() -> None:
    """A teacher's episodes hold no place in a buffer."""
