"""From a batch of episodes to token sequences: advantages, scales, and what needs no computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from agentrl.algorithms.advantages import group_advantages
from agentrl.algorithms.aggregation import token_scales
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.losses import vanishes_without_advantage
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.batch import TrainBatch, TrainTrajectory
from agentrl.types.generation import KeptTokens


def select_sequences(batch: TrainBatch, config: AlgorithmConfig) -> list[TokenSequence]:
    """The batch's trajectories that have something to learn from, in the batch's order.

    Every rank computes the same from the same batch. Trajectories without a token in the loss are left
    out, and so are those of advantage 0 where the loss vanishes with it; both still count in baselines
    and denominators.
    """
    advantages = batch_advantages(batch, config)
    scales = token_scales(batch, config.aggregation, config.constant_tokens)
    return [
        _sequence(
            batch.episodes[number].trajectories[branch],
            scales[number][branch],
            advantage_of(batch.episodes[number].trajectories[branch], advantages[number]),
        )
        for number, branch in places_in_loss(batch, advantages, config)
    ]


def places_in_loss(
    batch: TrainBatch, advantages: Sequence[Mapping[str, float]], config: AlgorithmConfig
) -> list[tuple[int, int]]:
    """Index of the episode, and of the trajectory in it, of every selected sequence, in order."""
    skips_zero = vanishes_without_advantage(config.loss)
    return [
        (number, branch)
        for number, (episode, by_agent) in enumerate(zip(batch.episodes, advantages, strict=True))
        for branch, trained in enumerate(episode.trajectories)
        if trained.loss_mask.any() and not (advantage_of(trained, by_agent) == 0.0 and skips_zero)
    ]


def batch_advantages(batch: TrainBatch, config: AlgorithmConfig) -> list[dict[str, float]]:
    """Advantages of each episode of the batch, by agent; under the empty name where one agent acts.

    Each agent has a baseline of its own: its rewards are compared with its own in the other episodes of the group.

    Example: white wins one game of two, and black the other: white's advantages are +1 and -1 over the deviation,
    black's -1 and +1, where the sums of their rewards would have told nothing.
    """
    units = [
        (number, agent, reward)
        for number, episode in enumerate(batch.episodes)
        for agent, reward in (episode.agent_rewards or {"": episode.reward}).items()
    ]
    members = [(batch.episodes[number].group, agent) for number, agent, _ in units]
    baselines = {member: place for place, member in enumerate(dict.fromkeys(members))}
    groups = torch.tensor([baselines[member] for member in members])
    rewards = torch.tensor([reward for _, _, reward in units])
    advantages: list[dict[str, float]] = [{} for _ in batch.episodes]
    found = group_advantages(rewards, groups, config.advantage).tolist()
    for (number, agent, _), advantage in zip(units, found, strict=True):
        advantages[number][agent] = advantage
    return advantages


def advantage_of(trained: TrainTrajectory, by_agent: Mapping[str, float]) -> float:
    """The advantage of a trajectory: its agent's."""
    return by_agent[""] if "" in by_agent else by_agent[trained.trajectory.agent]


def _sequence(trained: TrainTrajectory, scale: np.ndarray, advantage: float) -> TokenSequence:
    trajectory = trained.trajectory
    selected = np.flatnonzero(trained.loss_mask)
    last = int(selected[-1]) + 1
    return TokenSequence(
        token_ids=trajectory.token_ids[:last],
        selected=selected,
        logprobs=trajectory.logprobs[selected],
        advantages=np.full(len(selected), advantage, np.float32),
        scales=scale[selected],
        turns=trajectory.turns[selected],
        staleness=_staleness(trained)[selected],
        kept_tokens=_select_kept(trajectory.kept_tokens, trajectory.sampled, trained.loss_mask),
        routed_experts=None if trajectory.routed_experts is None else trajectory.routed_experts[:last],
    )


def _staleness(trained: TrainTrajectory) -> np.ndarray:
    """Staleness of each token, in steps, at least 1 where it is not fresh; with recorded experts that of the oldest
    token up to it.

    Experts are recorded once. So when weights change within an episode the engine computes the context again by
    its new routers, but the trainer by the old ones' choice: tokens behind the change are no measure of how well
    engine and trainer agree.
    """
    staleness = trained.staleness
    if trained.fresh is not None:
        is_sampled_before = trained.trajectory.sampled & ~trained.fresh
        staleness = np.where(is_sampled_before, np.maximum(staleness, 1), staleness)
    return staleness if trained.trajectory.routed_experts is None else np.maximum.accumulate(staleness)


def _select_kept(kept: KeptTokens | None, sampled: np.ndarray, mask: np.ndarray) -> KeptTokens | None:
    """Kept sets of the tokens in the loss, from sets of all sampled tokens."""
    if kept is None:
        return None
    chosen = np.flatnonzero(mask[sampled])
    sets = [kept.ids[kept.offsets[i] : kept.offsets[i + 1]].tolist() for i in chosen]
    return KeptTokens.from_lists(sets)
