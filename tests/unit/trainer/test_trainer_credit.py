"""Credit from the columns of a batch to the gradient, against plain loops."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from trainer_reference import (
    PLAIN,
    assert_moved_by,
    batch_of,
    make_batch,
    make_trajectory,
    mask_tokens,
    plain_gradient,
    plain_logprobs,
    take_step,
)

from agentrl.algorithms.config import AlgorithmConfig, DppoConfig
from agentrl.trainer.advantages import batch_advantages, token_advantages, unscored_tokens
from agentrl.trainer.explanation import LossTrace
from agentrl.trainer.minibatches import split_batch
from agentrl.trainer.model import load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.step import run_step
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.trajectory import Trajectory
from agentrl.types.version import PolicyVersion

pytestmark = pytest.mark.usefixtures("process_group")

SHAPING = AlgorithmConfig(advantage="leave_one_out", credit={"kind": "shaping", "scorer": "prm"})
TURNS = AlgorithmConfig(advantage="leave_one_out", credit={"kind": "turn_leave_one_out", "gamma": 0.5})
DISTIL = AlgorithmConfig(credit={"kind": "teacher", "scorer": "big", "weight": 0.5, "outcome_weight": 0.0})
MIXED = AlgorithmConfig(advantage="dr_grpo", credit={"kind": "teacher", "scorer": "big", "outcome_weight": 2.0})


def with_columns(batch: TrainBatch, **columns) -> TrainBatch:
    """The batch with columns that are made of each trajectory; one whose function gives None stays without."""
    episodes = []
    for number, episode in enumerate(batch.episodes):
        made = [{name: make(number, t.trajectory) for name, make in columns.items()} for t in episode.trajectories]
        trained = (dataclasses.replace(t, **values) for t, values in zip(episode.trajectories, made, strict=True))
        episodes.append(dataclasses.replace(episode, trajectories=tuple(trained)))
    return dataclasses.replace(batch, episodes=tuple(episodes))


def by_turn(values: list[float]):
    """A column with the n-th value at the tokens of turn n."""
    return lambda _, t: np.where(t.sampled, np.take(values, np.maximum(t.turns, 0)), 0).astype(np.float32)


def noise(number: int, trajectory: Trajectory) -> np.ndarray:
    """What some teacher might say; nothing of episode 1."""
    rng = np.random.default_rng(number)
    return None if number == 1 else -3.0 * rng.random(len(trajectory.token_ids)).astype(np.float32)


def plain_loss(network, batch: TrainBatch, advantage) -> torch.Tensor:
    """The plain policy gradient with a token's advantage by episode, trajectory, position and log pi, mean of tokens.

    Tokens are weighted as the token-level correction with cap 2 has it.
    """
    total = torch.zeros(())
    count = sum(int(t.loss_mask.sum()) for e in batch.episodes for t in e.trajectories)
    for number, episode in enumerate(batch.episodes):
        for trained in episode.trajectories:
            trajectory, selected = trained.trajectory, np.flatnonzero(trained.loss_mask)
            now = plain_logprobs(network, trajectory.token_ids, selected)
            for one, position in zip(now, selected, strict=True):
                weight = min(math.exp(one.item() - float(trajectory.logprobs[position])), 2.0)
                total = total - weight * advantage(number, trained, position, one.item()) * one / count
    return total


def others_mean(batch: TrainBatch, number: int) -> float:
    group = batch.episodes[number].group
    rewards = [e.reward for n, e in enumerate(batch.episodes) if e.group == group and n != number]
    return sum(rewards) / len(rewards)


def test_a_step_with_shaping_moves_the_weights_by_the_gradient_of_a_plain_loop(tiny_model, network):
    potentials, rewards = [0.5, -1.0, 2.0], [0.25, 0.0, -0.5]
    batch = mask_tokens(make_batch(network, noise=0.5), 0.2)
    batch = with_columns(batch, potentials=by_turn(potentials), turn_rewards=by_turn(rewards))

    def advantage(number: int, trained: TrainTrajectory, position: int, _now: float) -> float:
        turn = int(trained.trajectory.turns[position])
        to_go = batch.episodes[number].reward - sum(rewards[:turn])
        return to_go - others_mean(batch, number) - (potentials[turn] - potentials[0])

    loss = plain_loss(network, batch, advantage)
    metrics, update = take_step(tiny_model, batch, SHAPING)
    assert_moved_by(update, plain_gradient(network, loss))
    assert metrics["trainer/advantage_abs_mean"] > 0.1


@pytest.mark.parametrize("algorithm", [DISTIL, MIXED], ids=["alone", "mixed"])
def test_a_step_with_a_teacher_moves_the_weights_by_the_gradient_of_a_plain_loop(algorithm, tiny_model, network):
    batch = with_columns(mask_tokens(make_batch(network, noise=0.5), 0.2), teacher_logprobs=noise)
    credit, gaps = algorithm.credit, []

    def advantage(number: int, trained: TrainTrajectory, position: int, now: float) -> float:
        group = [e.reward for e in batch.episodes if e.group == batch.episodes[number].group]
        outcome = credit.outcome_weight * (batch.episodes[number].reward - sum(group) / len(group))
        if trained.teacher_logprobs is None:
            return outcome
        gaps.append(now - float(trained.teacher_logprobs[position]))
        return outcome - credit.weight * gaps[-1]

    loss = plain_loss(network, batch, advantage)
    metrics, update = take_step(tiny_model, batch, algorithm)
    assert_moved_by(update, plain_gradient(network, loss))
    assert metrics["trainer/teacher_kl_nats"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_tokens_without_advantage_are_computed_where_a_teacher_judges_them(network):
    batch = with_columns(make_batch(network), teacher_logprobs=noise)
    every, of_rewards = ([0, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4])
    for algorithm, numbers in ((DISTIL, every), (MIXED, sorted({*every, *of_rewards}))):
        found = select_sequences(batch, algorithm)
        expected = [batch.episodes[number].trajectories[0].trajectory.token_ids for number in numbers]
        assert len(found) == len(expected)
        for sequence, ids in zip(found, expected, strict=True):
            assert sequence.token_ids.tolist() == ids[: len(sequence.token_ids)].tolist()
    assert all(s.teacher_logprobs is None for s in select_sequences(batch, AlgorithmConfig()))
    assert len(select_sequences(batch, DISTIL.model_copy(update={"loss": DppoConfig()}))) == 7


def test_tokens_that_no_scorer_judged_are_counted(network):
    batch = with_columns(make_batch(network), teacher_logprobs=noise)
    (second,) = batch.episodes[1].trajectories
    whole = sum(int(t.loss_mask.sum()) for e in batch.episodes for t in e.trajectories)
    counts = [unscored_tokens(batch, algorithm) for algorithm in (DISTIL, SHAPING, TURNS, AlgorithmConfig())]
    assert counts == [int(second.loss_mask.sum()), whole, 0, 0]


def test_in_a_later_optimizer_step_the_distance_is_that_of_the_present_policy(tiny_model, network):
    batch = with_columns(make_batch(network, noise=0.3), teacher_logprobs=noise)
    algorithm = DISTIL.model_copy(update={"epochs": 2})
    policy = load_policy(tiny_model, PLAIN)
    sequences, trace = select_sequences(batch, algorithm), LossTrace()
    minibatches = split_batch(batch, sequences, algorithm)
    optimizer = OptimizerSet(policy, PLAIN.optimizer)
    run_step(policy, optimizer, sequences, algorithm, PLAIN, 1.0, False, trace, minibatches)
    (terms,) = trace.by_trajectory(batch, [(0, 0)])[0]
    (trained,) = batch.episodes[0].trajectories
    teacher = trained.teacher_logprobs[trained.loss_mask]
    assert terms.advantages == pytest.approx(0.5 * (teacher - terms.logprobs), abs=1e-5)
    assert np.abs(terms.proximal_ratios - 1).max() > 1e-3, "the policy has moved since the start"


def test_a_reply_that_branches_share_has_one_advantage_by_what_followed_it_in_time(network):
    """Turn 0 is shared; turn 1 follows on one branch, turn 2, of reward 1, later on the other."""
    rng = np.random.default_rng(0)
    plain = make_trajectory(network, rng)
    ids = np.arange(6, dtype=np.int32)
    rewards = [0.5, 0.25, 1.0]

    def branch(last: int) -> TrainTrajectory:
        turns = np.array([-1, 0, 0, -1, last, last], np.int16)
        weights = np.array([0, 0.5, 0.5, 0, 1, 1], np.float32)
        trajectory = dataclasses.replace(plain, token_ids=ids, turns=turns, weights=weights, logprobs=-weights)
        column = by_turn(rewards)(0, trajectory)
        return TrainTrajectory(trajectory, trajectory.sampled, np.zeros(6, np.int32), turn_rewards=column)

    tree = TrainEpisode("tree", 0, 3.0, (branch(1), branch(2)))
    withheld = TrainEpisode("withheld", 0, 1.0, ())
    batch = TrainBatch("main", PolicyVersion(0, 0), (tree, withheld))
    one, other = token_advantages(batch, TURNS.model_copy(update={"credit": SHAPING.credit}))[0]
    # 3 - 1 for all that follows turn 0; less .5 behind it, less .75 behind turn 1, whatever the branch.
    assert one[[1, 2, 4, 5]].tolist() == [2.0, 2.0, 1.5, 1.5]
    assert other[[1, 2, 4, 5]].tolist() == [2.0, 2.0, 1.25, 1.25]
    # With gamma .5, 1.25 of the outcome: .5 + .5 (.25 + .5 (1 + 1.25)); 1.375; 2.25, times 1, .5, .25.
    one, other = token_advantages(batch, TURNS)[0]
    expected = [(0.5 + 0.5 * (0.25 + 0.5 * 2.25)) - 1, 0.5 * (0.25 + 0.5 * 2.25 - 1), 0.25 * (2.25 - 1)]
    assert [float(one[1]), float(one[4]), float(other[4])] == pytest.approx(expected)
    assert float(other[1]) == float(one[1])


def test_each_agents_turns_have_its_own_rewards(network):
    rng = np.random.default_rng(0)
    plain = make_trajectory(network, rng)

    def of(agent: str, turn: int, reward: float) -> TrainTrajectory:
        turns = np.array([-1, turn], np.int16)
        trajectory = dataclasses.replace(plain, agent=agent, token_ids=np.arange(2, dtype=np.int32), turns=turns)
        return TrainTrajectory(trajectory, turns >= 0, np.zeros(2, np.int32), turn_rewards=np.float32([0, reward]))

    def game(white: float, black: float) -> TrainEpisode:
        trained = (of("white", 0, 0.25), of("white", 2, 0.5), of("black", 1, -1.0))
        return TrainEpisode("game", 0, 0.0, trained, {"white": white, "black": black})

    batch = TrainBatch("main", PolicyVersion(0, 0), (game(1.0, 0.0), game(0.0, 3.0)))
    first, second = token_advantages(batch, SHAPING)
    assert [float(column[1]) for column in first] == [1.0, 0.75, -3.0]
    assert [float(column[1]) for column in second] == [-1.0, -1.25, 3.0]


def test_episodes_of_one_state_are_compared_with_each_other_alone(network):
    rng = np.random.default_rng(0)
    members = [[(reward, [make_trajectory(network, rng)]) for reward in (1.0, 0.0, 0.5, 0.0, 4.0)]]
    batch = batch_of(members)
    forks = ["", "", "a", "a", "b"]
    episodes = tuple(dataclasses.replace(e, fork=fork) for e, fork in zip(batch.episodes, forks, strict=True))
    algorithm = AlgorithmConfig(advantage="leave_one_out", credit={"kind": "same_state"})
    found = batch_advantages(dataclasses.replace(batch, episodes=episodes), algorithm)
    assert [one[""] for one in found] == [1.0, -1.0, 0.5, -0.5, 0.0]
