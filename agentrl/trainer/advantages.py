"""Advantages of a batch's tokens, by the policy's rule of credit."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch

from agentrl.algorithms.advantages import group_advantages
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.credit import AgentTurns, shaping_advantages, turn_advantages
from agentrl.algorithms.credit_config import ShapingCreditConfig, TeacherCreditConfig, TurnCreditConfig, credit_columns
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.trajectory import NOT_SAMPLED

TokenAdvantages = list[list[np.ndarray]]
"""[L] float32 for each trajectory of each episode; it means nothing where a token was not sampled."""

_Unit = tuple[int, str, float]  # number of the episode, agent, reward


def token_advantages(batch: TrainBatch, config: AlgorithmConfig) -> TokenAdvantages:
    """The advantage of every token, but for what a teacher adds to it while the loss is computed."""
    if isinstance(config.credit, ShapingCreditConfig | TurnCreditConfig):
        return _by_turn(batch, config.credit)
    scale = config.credit.outcome_weight if isinstance(config.credit, TeacherCreditConfig) else 1.0
    return [
        [np.full(len(t.loss_mask), scale * advantage_of(t, by_agent), np.float32) for t in episode.trajectories]
        for episode, by_agent in zip(batch.episodes, batch_advantages(batch, config), strict=True)
    ]


def batch_advantages(batch: TrainBatch, config: AlgorithmConfig) -> list[dict[str, float]]:
    """Advantages of each episode's outcome, by agent; under the empty name where one agent acts.

    Each agent has a baseline of its own: its rewards are compared with its own in the other episodes of the group
    that began where this one did. Episodes that went on from one state are compared with each other alone: what they
    have in common is the history of an episode outside them, whose reward must not depend on it as a baseline.

    Example: white wins one game of two, and black the other: white's advantages are +1 and -1 over the deviation,
    black's -1 and +1, where the sums of their rewards would have told nothing.
    """
    units = _units(batch)
    members = _members(batch, units)
    baselines = {member: place for place, member in enumerate(dict.fromkeys(members))}
    groups = torch.tensor([baselines[member] for member in members])
    rewards = torch.tensor([reward for _, _, reward in units])
    advantages: list[dict[str, float]] = [{} for _ in batch.episodes]
    found = group_advantages(rewards, groups, config.advantage).tolist()
    for (number, agent, _), advantage in zip(units, found, strict=True):
        advantages[number][agent] = advantage
    return advantages


def advantage_of(trained: TrainTrajectory, by_agent: Mapping[str, float]) -> float:
    """The advantage of a trajectory's outcome: its agent's."""
    return by_agent[""] if "" in by_agent else by_agent[trained.trajectory.agent]


def unscored_tokens(batch: TrainBatch, config: AlgorithmConfig) -> int:
    """Tokens in the loss without the scores that the credit names: their episodes count by their outcome alone."""
    wanted = credit_columns(config.credit)
    if not wanted.scorer:
        return 0
    trained = (t for episode in batch.episodes for t in episode.trajectories)
    return sum(
        int(t.loss_mask.sum()) for t in trained if (t.potentials if wanted.potentials else t.teacher_logprobs) is None
    )


def _units(batch: TrainBatch) -> list[_Unit]:
    return [
        (number, agent, reward)
        for number, episode in enumerate(batch.episodes)
        for agent, reward in (episode.agent_rewards or {"": episode.reward}).items()
    ]


def _members(batch: TrainBatch, units: Sequence[_Unit]) -> list[Hashable]:
    """What each unit is compared within."""
    return [(batch.episodes[number].group, batch.episodes[number].fork, agent) for number, agent, _ in units]


def _by_turn(batch: TrainBatch, credit: ShapingCreditConfig | TurnCreditConfig) -> TokenAdvantages:
    units = _units(batch)
    turns = [_agent_turns(batch.episodes[number], agent, reward) for number, agent, reward in units]
    rule = shaping_advantages if isinstance(credit, ShapingCreditConfig) else turn_advantages
    found = rule([unit for _, unit in turns], _members(batch, units), credit.gamma)
    by_unit = {
        (number, agent): (numbers, advantages)
        for (number, agent, _), (numbers, _), advantages in zip(units, turns, found, strict=True)
    }

    def column(number: int, trained: TrainTrajectory) -> np.ndarray:
        agent = trained.trajectory.agent if batch.episodes[number].agent_rewards else ""
        numbers, advantages = by_unit[number, agent]
        sampled = trained.trajectory.sampled
        values = np.zeros(len(sampled), np.float32)
        values[sampled] = advantages[np.searchsorted(numbers, trained.trajectory.turns[sampled])]
        return values

    return [[column(n, t) for t in episode.trajectories] for n, episode in enumerate(batch.episodes)]


def _agent_turns(episode: TrainEpisode, agent: str, reward: float) -> tuple[np.ndarray, AgentTurns]:
    """The numbers of an agent's turns in rising order, as they were played, and what they were worth.

    Turns that branches share are there once. The empty name stands for the only agent.
    """
    own = [t for t in episode.trajectories if agent in ("", t.trajectory.agent)]
    places = [np.unique(t.trajectory.turns, return_index=True) for t in own]
    first = {
        int(turn): (branch, int(place))
        for branch, (numbers, indices) in enumerate(places)
        for turn, place in zip(numbers, indices, strict=True)
        if turn != NOT_SAMPLED
    }
    numbers = np.array(sorted(first), np.int64)

    def values(columns: Sequence[np.ndarray | None]) -> np.ndarray | None:
        found = [column for column in columns if column is not None]
        if len(found) < len(columns):
            return None
        return np.array([found[branch][place] for branch, place in map(first.__getitem__, numbers.tolist())], float)

    rewards = values([t.turn_rewards for t in own])
    rewards = np.zeros(len(numbers)) if rewards is None else rewards
    return numbers, AgentTurns(reward - float(rewards.sum()), rewards, values([t.potentials for t in own]))
