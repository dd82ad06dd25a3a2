from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from agentrl.algorithms.config import AlgorithmConfig, DppoConfig
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.trainer.advantages import batch_advantages
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.sequence import supervised_sequence
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.generation import KeptTokens
from agentrl.types.trajectory import Trajectory, build_trajectories
from agentrl.types.version import PolicyVersion

DR = AlgorithmConfig(advantage="dr_grpo")


def trajectory(replies: list[tuple[int, int]] = [(4, 0), (2, 1)]) -> Trajectory:  # noqa: B006
    return build_trajectories(build_episode(build_ticket(), replies))[0]


def episode(group: int, reward: float, *trajectories: Trajectory, mask: np.ndarray | None = None) -> TrainEpisode:
    trained = [TrainTrajectory(t, t.sampled if mask is None else mask, np.arange(len(t.turns))) for t in trajectories]
    return TrainEpisode("e", group, reward, tuple(trained))


def batch(*episodes: TrainEpisode) -> TrainBatch:
    return TrainBatch("main", PolicyVersion(0, 1), episodes)


def test_a_sequence_carries_the_columns_of_its_tokens_in_the_loss():
    first, second = select_sequences(batch(episode(0, 1.0, trajectory()), episode(0, 0.0, trajectory())), DR)
    # Prompt 3, reply 4, context 2, reply 2.
    assert first.token_ids.tolist() == [10, 11, 12, 20, 21, 22, 23, 10, 11, 20, 21]
    assert first.selected.tolist() == [3, 4, 5, 6, 9, 10]
    assert first.turns.tolist() == [0, 0, 0, 0, 1, 1]
    assert first.staleness.tolist() == [3, 4, 5, 6, 9, 10]
    assert first.logprobs.tolist() == [-0.5] * 6
    assert first.advantages.tolist() == [0.5] * 6
    assert second.advantages.tolist() == [-0.5] * 6
    assert first.scales.tolist() == pytest.approx([1 / 12] * 6)
    assert first.kept_tokens is None


def test_tokens_behind_the_last_in_the_loss_are_not_computed():
    whole = trajectory()
    mask = whole.sampled & (whole.turns == 0)
    (first, _) = select_sequences(batch(episode(0, 1.0, whole, mask=mask), episode(0, 0.0, whole)), DR)
    assert first.token_ids.tolist() == [10, 11, 12, 20, 21, 22, 23]
    assert first.selected.tolist() == [3, 4, 5, 6]


def test_kept_sets_are_those_of_the_tokens_in_the_loss():
    kept = KeptTokens.from_lists([[20], [21, 1], [22], [23, 2], [20, 3, 4], [21]])
    whole = dataclasses.replace(trajectory(), kept_tokens=kept)
    mask = whole.sampled.copy()
    mask[[3, 6]] = False  # the first and the fourth sampled token
    (first, _) = select_sequences(batch(episode(0, 1.0, whole, mask=mask), episode(0, 0.0, whole)), DR)
    assert first.kept_tokens.ids.tolist() == [21, 1, 22, 20, 3, 4, 21]
    assert first.kept_tokens.offsets.tolist() == [0, 2, 3, 6, 7]


def test_a_withheld_episode_counts_in_its_baseline_but_is_not_computed():
    sequences = select_sequences(batch(episode(0, 1.0, trajectory()), episode(0, 0.0)), DR)
    assert len(sequences) == 1
    assert sequences[0].advantages.tolist() == [0.5] * 6
    assert sequences[0].scales.tolist() == pytest.approx([1 / 6] * 6)


def test_an_episode_without_advantage_is_skipped_but_counts_in_the_denominator():
    episodes = episode(0, 1.0, trajectory()), episode(0, 0.0, trajectory()), episode(1, 1.0, trajectory())
    sequences = select_sequences(batch(*episodes), DR)
    assert len(sequences) == 2
    assert sequences[0].scales.tolist() == pytest.approx([1 / 18] * 6)


def test_an_episode_without_advantage_is_computed_where_the_loss_pulls_at_it_anyway():
    episodes = batch(episode(0, 1.0, trajectory()), episode(1, 1.0, trajectory()))
    assert select_sequences(episodes, DR) == []
    assert len(select_sequences(episodes, AlgorithmConfig(loss=DppoConfig(kl_weight=1e-3)))) == 2
    assert select_sequences(episodes, AlgorithmConfig(loss=DppoConfig(kl_weight=0))) == []


def test_a_trajectory_whose_tokens_are_all_stale_is_left_out():
    stale = np.zeros(11, bool)
    sequences = select_sequences(batch(episode(0, 1.0, trajectory(), mask=stale), episode(0, 0.0, trajectory())), DR)
    assert [s.advantages[0] for s in sequences] == [-0.5]


def test_supervised_sequences_end_with_the_last_sampled_token_and_weigh_all_alike():
    whole = trajectory()
    longer = dataclasses.replace(
        whole, token_ids=np.append(whole.token_ids, np.int32(99)), turns=np.append(whole.turns, np.int16(-1))
    )
    sequence = supervised_sequence(longer)
    assert sequence.token_ids.tolist() == whole.token_ids.tolist()
    assert sequence.selected.tolist() == [3, 4, 5, 6, 9, 10]
    assert sequence.advantages.tolist() == sequence.scales.tolist() == [1.0] * 6


def test_with_recorded_experts_a_token_is_as_stale_as_the_oldest_before_it():
    plain = trajectory([(4, 0), (2, 1)])
    routed = dataclasses.replace(plain, routed_experts=np.zeros((11, 1, 2), np.int16))
    staleness = np.asarray([0, 0, 0, 2, 2, 1, 1, 0, 0, 0, 0])
    seen = []
    for whole in (plain, routed):
        mask = whole.sampled & (staleness < 2)
        trained = (TrainTrajectory(whole, mask, staleness),)
        chosen = select_sequences(batch(TrainEpisode("e", 0, 1.0, trained), episode(0, 0.0, plain)), DR)
        seen.append(chosen[0].staleness.tolist())
    assert seen == [[1, 1, 0, 0], [2, 2, 2, 2]]


def test_recorded_experts_end_with_the_last_token_in_the_loss():
    whole = dataclasses.replace(trajectory(), routed_experts=np.arange(22, dtype=np.int16).reshape(11, 1, 2))
    mask = whole.sampled & (whole.turns == 0)
    (first, _) = select_sequences(batch(episode(0, 1.0, whole, mask=mask), episode(0, 0.0, trajectory())), DR)
    assert first.routed_experts[:, 0, 0].tolist() == [0, 2, 4, 6, 8, 10, 12]


def test_only_fresh_tokens_have_staleness_zero():
    """Drawn by the weights of the batch from an older cache, or by weights of another epoch, a token is not fresh."""
    plain = trajectory([(4, 0), (2, 1)])
    staleness = np.asarray([0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0])
    fresh = plain.sampled & (np.arange(11) > 5)
    trained = (TrainTrajectory(plain, plain.sampled, staleness, fresh),)
    chosen = select_sequences(batch(TrainEpisode("e", 0, 1.0, trained), episode(0, 0.0, plain)), DR)
    assert chosen[0].staleness.tolist() == [2, 2, 1, 0, 0, 0]


def by_agents(group: int, **rewards: float) -> TrainEpisode:
    """An episode in which several agents of the policy act, each with a trajectory."""
    branches = [dataclasses.replace(trajectory(), agent=agent) for agent in rewards]
    whole = episode(group, sum(rewards.values()) / len(rewards), *branches)
    return dataclasses.replace(whole, agent_rewards=rewards)


def test_each_agent_is_compared_with_itself_in_the_other_episodes_of_its_group():
    games = batch(by_agents(0, white=1.0, black=0.0), by_agents(0, white=0.0, black=1.0), by_agents(1, white=5.0))
    assert batch_advantages(games, DR) == [{"white": 0.5, "black": -0.5}, {"white": -0.5, "black": 0.5}, {"white": 0.0}]
    # The sums of their rewards are equal, which would have taught nothing.
    first, *_, last = select_sequences(games, DR)
    assert (first.advantages.tolist(), last.advantages.tolist()) == ([0.5] * 6, [0.5] * 6)


def test_what_one_agent_always_gets_does_not_move_the_others_baseline():
    games = batch(by_agents(0, guide=1.0, player=0.0), by_agents(0, guide=1.0, player=1.0))
    assert batch_advantages(games, DR) == [{"guide": 0.0, "player": -0.5}, {"guide": 0.0, "player": 0.5}]
    assert len(select_sequences(games, DR)) == 2, "the guide has nothing to learn"
