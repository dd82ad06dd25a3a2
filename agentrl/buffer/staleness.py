"""The staleness policies: which tokens of an episode may train, and which take is legal."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.group import Group
from agentrl.buffer.turn_columns import with_turn_columns
from agentrl.types.batch import NO_COLUMNS, CreditColumns, TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.episode import Episode, Fork
from agentrl.types.trajectory import Trajectory, build_trajectories
from agentrl.types.version import PolicyVersion


def build_batch(
    groups: Sequence[Group],
    policy: str,
    version: PolicyVersion,
    config: BufferConfig,
    columns: CreditColumns = NO_COLUMNS,
) -> TrainBatch:
    """Groups as one policy's batch for the step at `version`; the same groups always give the same batch.

    Args:
        groups: whole ones, in order.
        policy: whose agents' tokens are trained.
        version: that the step trains.
        config: how stale a token may be.
        columns: what the policy's credit wants to know of each turn.
    """
    episodes = []
    for number, group in enumerate(groups):
        for episode in group.ordered():
            view = train_view(episode, policy, version, config.staleness_bound)
            if config.staleness == "withhold" and oldest_staleness(view) > config.staleness_bound:
                view = ()
            episodes.append(_train_episode(episode, policy, number, with_turn_columns(episode, view, columns)))
    return TrainBatch(policy, version, tuple(episodes))


def build_counted(
    groups: Sequence[Group],
    policy: str,
    version: PolicyVersion,
    config: BufferConfig,
    columns: CreditColumns = NO_COLUMNS,
) -> tuple[TrainBatch, dict[str, int]]:
    """A batch, and how many tokens of each episode enter its loss."""
    batch = build_batch(groups, policy, version, config, columns)
    return batch, count_trained((episode for group in groups for episode in group.episodes), [batch])


def _train_episode(
    episode: Episode, policy: str, group: int, trajectories: tuple[TrainTrajectory, ...]
) -> TrainEpisode:
    rewards = {agent: float(reward) for agent, reward in episode.rewards_of(policy).items()}
    reward = float(episode.reward or 0.0)
    if len(rewards) == 1:
        reward, rewards = next(iter(rewards.values())), {}
    entry = TrainEpisode(episode.episode_id, group, reward, trajectories, rewards, episode.ticket.environment)
    fork = episode.ticket.fork
    if fork is None:
        return entry
    return replace(
        entry, fork=fork.name, pinned_tokens=sum(int(_pinned(t.trajectory, fork).sum()) for t in trajectories)
    )


def train_view(
    episode: Episode, policy: str, version: PolicyVersion, max_staleness: float
) -> tuple[TrainTrajectory, ...]:
    """The trajectories of a policy's agents in an episode, with tokens masked that are too old, or pinned in a fork.

    Raises:
        ValueError: a span is newer than `version`.
    """
    fork = episode.ticket.fork
    views = tuple(
        _mask(trajectory, version, max_staleness)
        for trajectory in build_trajectories(episode)
        if episode.policy_of(trajectory.agent) == policy
    )
    return views if fork is None else tuple(_without_pinned(view, fork) for view in views)


def without_fresh_tokens(batch: TrainBatch) -> TrainBatch:
    """A batch for weights of another epoch than those it was taken with: they drew none of its tokens."""
    episodes = tuple(
        replace(e, trajectories=tuple(replace(t, fresh=np.zeros_like(t.loss_mask)) for t in e.trajectories))
        for e in batch.episodes
    )
    return replace(batch, episodes=episodes)


def oldest_staleness(trajectories: Iterable[TrainTrajectory]) -> int:
    """The largest staleness of any sampled token; 0 where there is none."""
    return max((int(t.staleness.max(initial=0)) for t in trajectories), default=0)


def count_trained(episodes: Iterable[Episode], batches: Collection[TrainBatch]) -> dict[str, int]:
    """Tokens of each episode that enter a loss in any of the batches, each node counted once."""
    tokens = {episode.episode_id: 0 for episode in episodes}
    for entry in (e for batch in batches for e in batch.episodes if e.episode_id in tokens):
        weighted = sum(float((t.trajectory.weights * t.loss_mask).sum()) for t in entry.trajectories)
        tokens[entry.episode_id] += round(weighted)
    return tokens


def wait_permits(
    outstanding: Mapping[int, int], version_step: int, max_staleness: float, episodes_per_step: int
) -> bool:
    """Whether the episodes that a take leaves behind can all still be trained in time.

    For every start step o, those that started at or before o must fit into the (o + S - v) * B places
    of the steps that remain to them after this one.

    Args:
        outstanding: episodes left behind by the step of the weights that they started with.
        version_step: v, the step of the weights that the take trains.
        max_staleness: S; infinite makes every take legal.
        episodes_per_step: B.

    Example: S 1, B 4, v 3: one left behind from step 2 is legal no more (2 + 1 - 3 = 0 places).
    """
    started_before = 0
    for start in sorted(outstanding):
        started_before += outstanding[start]
        if started_before > (start + max_staleness - version_step) * episodes_per_step:
            return False
    return True


def _mask(trajectory: Trajectory, version: PolicyVersion, max_staleness: float) -> TrainTrajectory:
    staleness = np.zeros(len(trajectory.token_ids), np.int32)
    fresh = trajectory.sampled
    for span in trajectory.versions:
        staleness[span.start : span.end] = _staleness(span.version, version, max_staleness)
    for span in (*trajectory.versions, *trajectory.kv_versions):
        fresh[span.start : span.end] &= span.version == version
    mask = trajectory.sampled & (staleness <= max_staleness)
    return TrainTrajectory(trajectory, mask, staleness, fresh)


def _without_pinned(view: TrainTrajectory, fork: Fork) -> TrainTrajectory:
    """A fork's view, in which what its parent drew counts as context."""
    own = ~_pinned(view.trajectory, fork)
    fresh = None if view.fresh is None else view.fresh & own
    return replace(view, loss_mask=view.loss_mask & own, staleness=view.staleness * own, fresh=fresh)


def _pinned(trajectory: Trajectory, fork: Fork) -> np.ndarray:
    """[L] bool, True where the parent of a fork drew the token."""
    return trajectory.sampled & (trajectory.turns <= fork.turn)


def _staleness(writer: PolicyVersion, version: PolicyVersion, max_staleness: float) -> int:
    """Steps between two versions; too many, if there is a bound, for weights of an earlier epoch ahead of this one.

    Such weights were lost together with the record of how they were made, as in a salvaged journal. Without a bound
    nothing is too old, and they count as one step away.
    """
    if writer.epoch < version.epoch and writer.step > version.step:
        return int(max_staleness) + 1 if math.isfinite(max_staleness) else 1
    return version.steps_since(writer)
