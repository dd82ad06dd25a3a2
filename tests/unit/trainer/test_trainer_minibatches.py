"""Several optimizer steps on one batch: against plain transformers, a plain optimizer and plain loops."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trainer_reference import (
    PLAIN_SGD,
    Weights,
    batch_of,
    make_batch,
    make_trajectory,
    mask_tokens,
    plain_logprobs,
)
from transformers import PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig, CispoConfig, PpoConfig
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.explanation import LossTrace
from agentrl.trainer.minibatches import split_batch
from agentrl.trainer.model import full_weights, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.step import run_step
from agentrl.types.batch import TrainBatch
from agentrl.types.errors import TrainerError
from agentrl.types.explanation import TokenStatus
from agentrl.types.version import PolicyVersion

pytestmark = pytest.mark.usefixtures("process_group")

NARROW = PpoConfig(clip_low=0.02, clip_high=0.03)
TWICE = AlgorithmConfig(advantage="dr_grpo", loss=NARROW, minibatches=2, epochs=2)
ADAM = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=0.5), micro_batch_tokens=24
)
SGD = ADAM.model_copy(update={"optimizer": PLAIN_SGD.model_copy(update={"learning_rate": 0.3, "max_grad_norm": 0.5})})


def step_of(
    model, batch: TrainBatch, algorithm: AlgorithmConfig, config: TrainerConfig, trace: LossTrace | None = None
) -> tuple[dict[str, float], Weights]:
    """Metrics of one step, and the weights behind it."""
    policy = load_policy(model, config)
    sequences = select_sequences(batch, algorithm)
    minibatches = split_batch(batch, sequences, algorithm)
    optimizer = OptimizerSet(policy, config.optimizer)
    metrics = run_step(policy, optimizer, sequences, algorithm, config, 1.0, False, trace, minibatches)
    return metrics, {name: tensor.clone() for name, tensor in full_weights(policy).items()}


def plain_minibatches(batch: TrainBatch, algorithm: AlgorithmConfig) -> list[list[int]]:
    """Numbers of episodes: shuffled by step and epoch, the first parts one larger where it does not come out even."""
    trained = [n for n, e in enumerate(batch.episodes) if sum(int(t.loss_mask.sum()) for t in e.trajectories)]
    parts = []
    for epoch in range(algorithm.epochs):
        left = np.random.default_rng([batch.version.step, epoch]).permutation(trained).tolist()
        for number in range(algorithm.minibatches):
            size = math.ceil(len(left) / (algorithm.minibatches - number))
            parts.append(left[:size])
            left = left[size:]
    return parts


def plain_training(
    network: PreTrainedModel, batch: TrainBatch, algorithm: AlgorithmConfig, config: TrainerConfig
) -> tuple[Weights, list[float], int]:
    """Weights, losses and the number of clipped tokens of PPO-clip with a token mean, written out."""
    network = copy.deepcopy(network)
    values = config.optimizer
    if values.kind == "sgd":
        optimizer = torch.optim.SGD(network.parameters(), lr=values.learning_rate)
    else:
        options = {"betas": (values.momentum, values.second_beta), "weight_decay": values.weight_decay}
        optimizer = torch.optim.AdamW(network.parameters(), lr=values.learning_rate, **options)
    rewards = [[e.reward for e in batch.episodes if e.group == episode.group] for episode in batch.episodes]
    rows = [(t.trajectory, np.flatnonzero(t.loss_mask)) for e in batch.episodes for t in e.trajectories]
    with torch.no_grad():
        proximal = [plain_logprobs(network, t.token_ids, selected) for t, selected in rows]
    losses, num_clipped = [], 0
    for numbers in plain_minibatches(batch, algorithm):
        tokens, total, learns = sum(len(rows[n][1]) for n in numbers), torch.zeros(()), False
        for number in numbers:
            advantage = batch.episodes[number].reward - sum(rewards[number]) / len(rewards[number])
            trajectory, selected = rows[number]
            learns = learns or advantage != 0
            for now, then, at in zip(
                plain_logprobs(network, trajectory.token_ids, selected), proximal[number], selected, strict=True
            ):
                weight = min(math.exp(then.item() - float(trajectory.logprobs[at])), 2.0)
                ratio = torch.exp(now - then)
                limited = ratio.clamp(1 - algorithm.loss.clip_low, 1 + algorithm.loss.clip_high)
                total = total - weight * torch.minimum(advantage * ratio, advantage * limited) / tokens
                num_clipped += bool(advantage * limited < advantage * ratio)
        if not learns:
            continue
        losses.append(total.item())
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), values.max_grad_norm)
        optimizer.step()
    return {name: p.detach() for name, p in network.named_parameters()}, losses, num_clipped


def largest_difference(mine: Weights, other: Weights) -> float:
    assert mine.keys() == other.keys()
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


@pytest.mark.parametrize("config", [SGD, ADAM], ids=["sgd", "adamw"])
def test_two_minibatches_in_two_epochs_train_as_a_plain_loop_does(config, tiny_model, network):
    batch = mask_tokens(make_batch(network, noise=0.5), 0.2)
    expected, losses, num_clipped = plain_training(network, batch, TWICE, config)
    metrics, weights = step_of(tiny_model, batch, TWICE, config)
    start = {name: p.detach() for name, p in network.named_parameters()}
    moved = largest_difference(weights, start)
    assert len(losses) == 4
    assert num_clipped > 5
    assert largest_difference(weights, expected) < 2e-3 * moved
    assert metrics["trainer/optimizer_steps"] == 4
    assert metrics["trainer/skipped_minibatches"] == 0
    assert metrics["trainer/loss"] == pytest.approx(sum(losses) / 4, abs=1e-5)
    assert metrics["trainer/clipped_fraction"] * metrics["trainer/computed_tokens"] == pytest.approx(num_clipped)


@pytest.mark.parametrize(("epochs", "is_felt"), [(1, False), (2, True)])
def test_the_upper_clip_is_felt_from_the_second_optimizer_step_on(epochs, is_felt, tiny_model, network):
    batch = make_batch(network, noise=0.3)
    found = []
    for clip_high in (0.005, 5.0):
        loss = PpoConfig(clip_low=0.9, clip_high=clip_high)
        algorithm = AlgorithmConfig(advantage="dr_grpo", loss=loss, epochs=epochs)
        found.append(step_of(tiny_model, batch, algorithm, SGD))
    (narrow, narrow_weights), (wide, wide_weights) = found
    assert (narrow["trainer/clipped_fraction"] > wide["trainer/clipped_fraction"] == 0) == is_felt
    assert (largest_difference(narrow_weights, wide_weights) > 1e-4) == is_felt
    if not is_felt:
        assert all(torch.equal(tensor, wide_weights[name]) for name, tensor in narrow_weights.items())


def test_the_look_before_several_optimizer_steps_changes_nothing(tiny_model, network):
    """Two minibatches of which one learns nothing are one optimizer step of the other's, with its denominators."""
    batch = make_batch(network, rewards=((1.0, 0.0), (1.0, 1.0)), noise=0.3)
    for step in range(64):  # until the shuffle parts the two groups
        batch = dataclasses.replace(batch, version=PolicyVersion(0, step))
        split = AlgorithmConfig(advantage="dr_grpo", minibatches=2)
        if sorted(map(sorted, plain_minibatches(batch, split))) == [[0, 1], [2, 3]]:
            break
    metrics, weights = step_of(tiny_model, batch, split, ADAM)
    assert (metrics["trainer/optimizer_steps"], metrics["trainer/skipped_minibatches"]) == (1, 1)
    alone = dataclasses.replace(batch, episodes=batch.episodes[:2])
    expected_metrics, expected = step_of(tiny_model, alone, AlgorithmConfig(advantage="dr_grpo"), ADAM)
    assert metrics["trainer/loss"] == pytest.approx(expected_metrics["trainer/loss"], abs=1e-6)
    assert largest_difference(weights, expected) < 1e-5


def test_more_minibatches_than_episodes_leave_some_without_a_step(tiny_model, network):
    batch = make_batch(network, rewards=((1.0, 0.0),), noise=0.3)
    metrics, _ = step_of(tiny_model, batch, AlgorithmConfig(minibatches=5), ADAM)
    assert (metrics["trainer/optimizer_steps"], metrics["trainer/skipped_minibatches"]) == (2, 3)


def test_a_gradient_that_is_not_finite_behind_an_optimizer_step_says_that_weights_have_changed(tiny_model, network):
    batch = make_batch(network, noise=0.3)
    algorithm = AlgorithmConfig(advantage="dr_grpo", minibatches=2)
    policy = load_policy(tiny_model, ADAM)
    sequences = select_sequences(batch, algorithm)
    minibatches = split_batch(batch, sequences, algorithm)
    minibatches[1].sequences[0].advantages[0] = math.nan
    optimizer = OptimizerSet(policy, ADAM.optimizer)
    with pytest.raises(TrainerError, match=r"norm is nan; 1 optimizer steps on this batch have changed the weights"):
        run_step(policy, optimizer, sequences, algorithm, ADAM, 1.0, False, minibatches=minibatches)


def test_losses_against_the_sampling_policy_stay_against_it_in_the_second_epoch(tiny_model, network):
    batch = make_batch(network, noise=0.3)
    algorithm = AlgorithmConfig(advantage="dr_grpo", loss=CispoConfig(), epochs=2)
    trace = LossTrace()
    step_of(tiny_model, batch, algorithm, SGD, trace)
    _, between = step_of(tiny_model, batch, algorithm.model_copy(update={"epochs": 1}), SGD)
    moved = copy.deepcopy(network)
    moved.load_state_dict(between, strict=False)
    trajectory = batch.episodes[0].trajectories[0].trajectory
    selected = np.flatnonzero(trajectory.sampled)
    with torch.no_grad():
        now, then = (plain_logprobs(n, trajectory.token_ids, selected).numpy() for n in (moved, network))
    (terms,) = trace.by_trajectory(batch, [(0, 0)])[0]
    assert terms.logprobs == pytest.approx(now, abs=1e-5)
    assert terms.ratios == pytest.approx(np.exp(now - trajectory.logprobs[selected]), rel=1e-4)
    assert terms.proximal_ratios == pytest.approx(np.exp(now - then), rel=1e-4)
    assert np.abs(terms.proximal_ratios - 1).max() > 1e-3


def test_statuses_are_those_of_the_last_epoch(tiny_model, network):
    batch = make_batch(network, noise=0.3)
    trace = LossTrace()
    step_of(tiny_model, batch, TWICE, SGD, trace)
    places = [(number, 0) for number in range(5)]
    terms = [one for episode in trace.by_trajectory(batch, places) for one in episode if one]
    seen = 0
    for one, episode in zip(terms, batch.episodes, strict=False):
        for ratio, status in zip(one.proximal_ratios, one.statuses, strict=True):
            advantage = episode.reward - np.mean([e.reward for e in batch.episodes if e.group == episode.group])
            is_out = ratio > 1.03 if advantage > 0 else ratio < 0.98
            clipped = TokenStatus.CLIPPED_HIGH if advantage > 0 else TokenStatus.CLIPPED_LOW
            assert status == (clipped if is_out else TokenStatus.KEPT)
            seen += is_out
    assert seen > 3


@pytest.fixture(scope="module")
def wide_batch(network) -> TrainBatch:
    """Two groups that differ and one that does not; some episodes have two branches, one has no token in the loss."""
    rng = np.random.default_rng(4)

    def branches(count: int) -> list:
        return [make_trajectory(network, rng) for _ in range(count)]

    groups = [[(float(n % 2), branches(1 + n % 2)) for n in range(5)], [(1.0, branches(1)), (0.0, branches(2))]]
    batch = batch_of([*groups, [(1.0, branches(1)), (1.0, branches(1))]])
    first = dataclasses.replace(batch.episodes[0], trajectories=())
    return dataclasses.replace(batch, episodes=(first, *batch.episodes[1:]))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(minibatches=st.integers(1, 10), epochs=st.integers(1, 4), step=st.integers(0, 1000))
def test_every_epoch_deals_out_every_sequence_once_and_branches_stay_together(wide_batch, minibatches, epochs, step):
    algorithm = AlgorithmConfig(advantage="dr_grpo", minibatches=minibatches, epochs=epochs)
    batch = dataclasses.replace(wide_batch, version=PolicyVersion(0, step))
    sequences = select_sequences(batch, algorithm)
    places = [(n, b) for n in range(1, 7) for b in range(len(batch.episodes[n].trajectories))]
    assert len(sequences) == len(places)
    parts = split_batch(batch, sequences, algorithm)
    assert len(parts) == minibatches * epochs
    for epoch in range(epochs):
        of_epoch = parts[epoch * minibatches : (epoch + 1) * minibatches]
        assert sorted(i for part in of_epoch for i in part.indices) == list(range(len(sequences)))
        episodes = [{places[i][0] for i in part.indices} for part in of_epoch]
        assert sum(map(len, episodes)) == len(set().union(*episodes)), "an episode in two minibatches"
    for part in parts:
        for index, sequence in zip(part.indices, part.sequences, strict=True):
            assert sequence.token_ids is sequences[index].token_ids
    again = split_batch(dataclasses.replace(batch, version=PolicyVersion(7, step)), sequences, algorithm)
    assert [part.indices for part in again] == [part.indices for part in parts], "a redo in a later epoch of the run"


@pytest.mark.parametrize("aggregation", ["token", "episode", "constant"])
def test_denominators_are_those_of_the_minibatch(aggregation, wide_batch):
    algorithm = AlgorithmConfig(
        advantage="dr_grpo", aggregation=aggregation, constant_tokens=10, minibatches=2, epochs=2
    )
    sequences = select_sequences(wide_batch, algorithm)
    places = [(n, b) for n in range(1, 7) for b in range(len(wide_batch.episodes[n].trajectories))]
    parts = split_batch(wide_batch, sequences, algorithm)
    counts = [sum(int(t.loss_mask.sum()) for t in e.trajectories) for e in wide_batch.episodes]
    for part, numbers in zip(parts, plain_minibatches(wide_batch, algorithm), strict=True):
        assert {places[i][0] for i in part.indices} == {n for n in numbers if n < 7}, "the last group learns nothing"
        for index, sequence in zip(part.indices, part.sequences, strict=True):
            denominator = {
                "token": sum(counts[n] for n in numbers),
                "episode": len(numbers) * counts[places[index][0]],
                "constant": len(numbers) * 10,
            }[aggregation]
            assert sequence.scales == pytest.approx(np.full(len(sequence.selected), 1 / denominator))


def test_epochs_and_steps_are_shuffled_differently(wide_batch):
    algorithm = AlgorithmConfig(advantage="dr_grpo", minibatches=2, epochs=2)
    sequences = select_sequences(wide_batch, algorithm)
    orders = []
    for step in range(4):
        batch = dataclasses.replace(wide_batch, version=PolicyVersion(0, step))
        parts = split_batch(batch, sequences, algorithm)
        orders += [parts[0].indices, parts[2].indices]
    assert len(set(orders)) > 4
