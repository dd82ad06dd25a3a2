from __future__ import annotations

import numpy as np
import pytest

from agentrl.algorithms.aggregation import token_scales
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.trajectory import Trajectory
from agentrl.types.version import PolicyVersion


def trained(weights: list[float], mask: list[int]) -> TrainTrajectory:
    count = len(weights)
    turns = np.where(np.asarray(weights) > 0, 0, -1).astype(np.int16)
    zeros = np.zeros(count, np.float32)
    trajectory = Trajectory("agent", np.arange(count), turns, np.asarray(weights, np.float32), zeros, (), None)
    return TrainTrajectory(trajectory, np.asarray(mask, bool), np.zeros(count, np.int32))


def batch(*episodes: tuple[TrainTrajectory, ...]) -> TrainBatch:
    rows = [TrainEpisode(f"e{i}", 0, 1.0, trajectories) for i, trajectories in enumerate(episodes)]
    return TrainBatch("main", PolicyVersion(0, 0), tuple(rows))


# A linear episode of two trained tokens (a third is stale), one of two branches that share a token and have
# one of their own each, and one that is withheld: 2 and 3 tokens.
EPISODES = batch(
    (trained([0, 1, 1, 1], [0, 1, 1, 0]),),
    (trained([0, 0.5, 1], [0, 1, 1]), trained([0, 0.5, 1], [0, 1, 1])),
    (),
)


def scales(kind: str, constant: int = 100) -> list[list[float]]:
    return [[float(x) for array in episode for x in array] for episode in token_scales(EPISODES, kind, constant)]


def test_token_mean_by_hand():
    expected = [[0, 0.2, 0.2, 0], [0, 0.1, 0.2, 0, 0.1, 0.2], []]
    for mine, right in zip(scales("token"), expected, strict=True):
        assert mine == pytest.approx(right)


def test_episode_mean_by_hand():
    expected = [[0, 1 / 4, 1 / 4, 0], [0, 1 / 12, 1 / 6, 0, 1 / 12, 1 / 6], []]
    for mine, right in zip(scales("episode"), expected, strict=True):
        assert mine == pytest.approx(right)


def test_constant_denominator_by_hand():
    expected = [[0, 1 / 200, 1 / 200, 0], [0, 1 / 400, 1 / 200, 0, 1 / 400, 1 / 200], []]
    for mine, right in zip(scales("constant"), expected, strict=True):
        assert mine == pytest.approx(right)


@pytest.mark.parametrize("kind", ["token", "episode"])
def test_the_scales_of_a_batch_sum_to_one(kind):
    assert sum(map(sum, scales(kind))) == pytest.approx(1)


def test_under_the_episode_mean_each_trained_episode_counts_alike_whatever_its_branches():
    assert [sum(episode) for episode in scales("episode")] == pytest.approx([0.5, 0.5, 0])


def test_a_batch_without_a_trained_token_has_finite_scales():
    empty = batch((trained([0, 1], [0, 0]),))
    for kind in ("token", "episode", "constant"):
        assert token_scales(empty, kind, 10)[0][0].tolist() == [0, 0]


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="no aggregation 'mean'"):
        token_scales(EPISODES, "mean", 1)
