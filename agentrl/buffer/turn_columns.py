"""Lays what scorers said of turns beside the tokens of each turn's reply."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from agentrl.types.batch import CreditColumns, TrainTrajectory
from agentrl.types.episode import Episode
from agentrl.types.trajectory import NOT_SAMPLED, Trajectory
from agentrl.types.turn_score import DIGEST_BYTES, TurnKey, TurnScore


@dataclass(frozen=True, slots=True)
class _Reply:
    """One turn's reply on a branch: tokens start to end, and the key that its score must have."""

    key: TurnKey
    start: int
    end: int


def with_turn_columns(
    episode: Episode, trajectories: tuple[TrainTrajectory, ...], wanted: CreditColumns
) -> tuple[TrainTrajectory, ...]:
    """The trajectories of one policy's agents in an episode with the columns that its credit asks for.

    Scores are laid for all of these agents' turns or for none: an episode of which the scorer failed, or is missing,
    in one turn has no such column, and its outcome alone counts. So it is with one whose record says that the scorer
    was late: what it said after all, once a step had taken the episode, must not make another batch of a redo.
    """
    if wanted.turn_rewards:
        rewards = turn_rewards(episode)
        trajectories = tuple(replace(t, turn_rewards=_rewards_column(t.trajectory, rewards)) for t in trajectories)
    was_late = any(record.scorer == wanted.scorer and record.failure is not None for record in episode.scores)
    if not wanted.scorer or was_late:
        return trajectories
    scores = {score.key: score for score in episode.turn_scores.get(wanted.scorer, ())}
    columns = [_column(episode.episode_id, t.trajectory, scores, wanted) for t in trajectories]
    found = [column for column in columns if column is not None]
    if len(found) < len(columns):
        return trajectories
    pairs = zip(trajectories, found, strict=True)
    if wanted.potentials:
        return tuple(replace(trained, potentials=column) for trained, column in pairs)
    return tuple(replace(trained, teacher_logprobs=column) for trained, column in pairs)


def turn_rewards(episode: Episode) -> dict[int, float]:
    """The weighted sum of each turn's rewards over all scorers, which the episode's reward contains."""
    rewards: dict[int, float] = {}
    for record in episode.scores:
        for turn, reward in (record.score.turn_rewards if record.score is not None else {}).items():
            rewards[turn] = rewards.get(turn, 0.0) + record.weight * reward
    return rewards


def _rewards_column(trajectory: Trajectory, rewards: Mapping[int, float]) -> np.ndarray:
    column = np.zeros(len(trajectory.token_ids), np.float32)
    for turn, reward in rewards.items():
        column[trajectory.turns == turn] = reward
    return column


def _column(
    episode_id: str, trajectory: Trajectory, scores: Mapping[TurnKey, TurnScore], wanted: CreditColumns
) -> np.ndarray | None:
    """[L] float32, or None where a turn lacks what is wanted."""
    replies = list(_replies(episode_id, trajectory))
    found = [scores[reply.key] for reply in replies if reply.key in scores]
    if len(found) < len(replies) or any(score.failure is not None for score in found):
        return None
    values = _potentials(found) if wanted.potentials else _logprobs(replies, found)
    if values is None:
        return None
    column = np.zeros(len(trajectory.token_ids), np.float32)
    for reply, value in zip(replies, values, strict=True):
        column[reply.start : reply.end] = value
    return column


def _potentials(scores: Iterable[TurnScore]) -> list[np.ndarray] | None:
    """Worth of the state that each reply of a branch was drawn from.

    It is what the scorer says of that very state, or else of the one that the reply before led to; both are known
    before the reply is drawn. The opening of a branch has neither where a scorer gives values alone: NaN.
    """
    potentials: list[np.ndarray] = []
    before = math.nan
    for score in scores:
        if score.prior is None and score.value is None:
            return None
        potentials.append(np.asarray(before if score.prior is None else score.prior))
        before = math.nan if score.value is None else score.value
    return potentials


def _logprobs(replies: Iterable[_Reply], scores: Iterable[TurnScore]) -> list[np.ndarray] | None:
    found = []
    for reply, score in zip(replies, scores, strict=True):
        if score.logprobs is None or len(score.logprobs) != reply.end - reply.start:
            return None
        found.append(score.logprobs)
    return found


def _replies(episode_id: str, trajectory: Trajectory) -> Iterator[_Reply]:
    """The replies of a branch in order; the digest of each is of all tokens up to its end."""
    ids = np.ascontiguousarray(trajectory.token_ids, np.int32)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    borders = [0, *(np.flatnonzero(np.diff(trajectory.turns)) + 1).tolist(), len(ids)]
    for start, end in pairwise(borders):
        digest.update(ids[start:end].tobytes())
        turn = int(trajectory.turns[start])
        if turn != NOT_SAMPLED:
            yield _Reply(TurnKey(episode_id, trajectory.agent, turn, digest.copy().hexdigest()), start, end)
