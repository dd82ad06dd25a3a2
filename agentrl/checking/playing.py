"""Plays one episode by messages and keeps what was said, how long it took and how it ended."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from agentrl.checking.players import Player
from agentrl.protocols import DurableEnvironment, EnvironmentHost
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.errors import EpisodeError, Failure
from agentrl.types.message import Message
from agentrl.types.task import Task


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """One message of a player and the environment's reaction, which took `step_s` seconds."""

    agent: str | None
    action: Message
    result: StepResult
    step_s: float


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode as it was played; without a score `failure` says why. `is_cut` if the turns ran out.

    `actions` are all that the player did, one more than there are steps where the last one failed.

    Example: ``PlayedEpisode(task, opening, (action,), (step,), Score(1.0), None, is_cut=False)``.
    """

    task: Task
    opening: Opening | None
    actions: tuple[Message, ...]
    steps: tuple[PlayedStep, ...]
    score: Score | None
    failure: Failure | None
    is_cut: bool

    @property
    def seen(self) -> list[object]:
        """All that the environment said, to be compared with another episode's."""
        return [self.opening, *(step.result for step in self.steps), self.score, self.failure]

    @property
    def reward(self) -> float | None:
        """Of the score; None if there is none."""
        return None if self.score is None else self.score.reward


async def play(
    host: EnvironmentHost,
    task: Task,
    player: Player,
    max_turns: int,
    on_opening: Callable[[Opening], None] = lambda opening: None,
    on_step: Callable[[PlayedStep], None] = lambda step: None,
) -> PlayedEpisode:
    """One episode from its start to its score. What fails in the environment is the episode's failure."""
    opening: Opening | None = None
    actions: list[Message] = []
    steps: list[PlayedStep] = []
    score, failure = None, None
    try:
        async with host.open(task) as environment:
            opening = await environment.start()
            on_opening(opening)
            async for step in _turns(environment, opening, player, max_turns, actions):
                steps.append(step)
                on_step(step)
            score = await environment.score()
    except EpisodeError as error:
        failure = error.failure
    is_cut = failure is None and not (steps and steps[-1].result.is_done)
    return PlayedEpisode(task, opening, tuple(actions), tuple(steps), score, failure, is_cut)


async def _turns(
    environment: DurableEnvironment, opening: Opening, player: Player, max_turns: int, actions: list[Message]
) -> AsyncIterator[PlayedStep]:
    conversations: dict[str | None, list[Message]] = defaultdict(list)
    agent = opening.agent
    conversations[agent] += opening.messages
    for _ in range(max_turns):
        action = await player.act(conversations[agent], opening.tools)
        actions.append(action)
        conversations[agent].append(action)
        began = time.perf_counter()
        result = await environment.step(action)
        yield PlayedStep(agent, action, result, time.perf_counter() - began)
        if result.is_done:
            return
        agent = agent if result.agent is None else result.agent
        conversations[agent] += result.messages


class Repeater:
    """A player that does what another one did."""

    def __init__(self, actions: Sequence[Message]) -> None:
        self._actions = iter(actions)

    async def act(self, messages: object, tools: object) -> Message:
        """The next of the actions."""
        return next(self._actions)


async def replay(host: EnvironmentHost, task: Task, actions: Sequence[Message]) -> PlayedEpisode:
    """The same actions in a fresh instance."""
    return await play(host, task, Repeater(actions), len(actions))
