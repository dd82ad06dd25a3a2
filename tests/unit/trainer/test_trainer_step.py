from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from trainer_reference import (
    PLAIN,
    PLAIN_SGD,
    assert_moved_by,
    make_batch,
    make_trajectory,
    plain_gradient,
    plain_logprobs,
    take_step,
)

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.trainer.model import full_weights, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.sequence import supervised_sequence
from agentrl.trainer.step import run_step, run_supervised
from agentrl.types.batch import TrainBatch
from agentrl.types.errors import TrainerError

pytestmark = pytest.mark.usefixtures("process_group")

DR = AlgorithmConfig(advantage="dr_grpo")


def shift_one_token(batch: TrainBatch, nats: float) -> TrainBatch:
    """The batch whose first sampled token is reported less likely than it was."""
    episode = batch.episodes[0]
    (trained,) = episode.trajectories
    logprobs = trained.trajectory.logprobs.copy()
    logprobs[np.flatnonzero(trained.loss_mask)[0]] -= nats
    trained = dataclasses.replace(trained, trajectory=dataclasses.replace(trained.trajectory, logprobs=logprobs))
    return dataclasses.replace(
        batch, episodes=(dataclasses.replace(episode, trajectories=(trained,)), *batch.episodes[1:])
    )


@pytest.mark.parametrize(("temperature", "kept_size"), [(1.0, None), (0.7, None), (0.7, 4)])
def test_the_gate_passes_when_engine_and_trainer_agree(temperature, kept_size, tiny_model, network):
    batch = make_batch(network, temperature=temperature, kept_size=kept_size)
    metrics, _ = take_step(tiny_model, batch, DR, temperature=temperature, is_gate=True)
    assert metrics["trainer/fresh_gap_max_nats"] < 1e-5
    assert metrics["trainer/fresh_tokens"] == metrics["trainer/computed_tokens"] > 10


def test_the_gate_stops_the_run_for_a_single_token_that_is_off(tiny_model, network):
    batch = shift_one_token(make_batch(network), 0.002)
    with pytest.raises(TrainerError, match=r"first-step gate: .* by 2\.00e-03 nats.*max_gap_nats = 0\.001"):
        take_step(tiny_model, batch, DR, is_gate=True)


def test_the_gate_stops_the_run_for_a_wrong_temperature(tiny_model, network):
    with pytest.raises(TrainerError, match="first-step gate"):
        take_step(tiny_model, make_batch(network, temperature=0.7), DR, temperature=0.71, is_gate=True)


def test_a_gate_that_stops_leaves_the_weights_as_they_were(tiny_model, network):
    policy = load_policy(tiny_model, PLAIN)
    before = {name: tensor.clone() for name, tensor in full_weights(policy).items()}
    sequences = select_sequences(make_batch(network, noise=1.0, staleness=0), DR)
    with pytest.raises(TrainerError):
        run_step(policy, OptimizerSet(policy, PLAIN_SGD), sequences, DR, PLAIN, 1.0, is_gate=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(policy).items())


def test_the_gate_looks_at_fresh_tokens_only(tiny_model, network):
    stale = make_batch(network, noise=1.0, staleness=1)
    metrics, _ = take_step(tiny_model, stale, DR, is_gate=True)
    assert metrics["trainer/fresh_tokens"] == 0
    assert metrics["trainer/fresh_gap_max_nats"] == 0


def test_the_bound_of_the_gate_is_the_configured_one(tiny_model, network):
    batch = shift_one_token(make_batch(network), 0.3)
    loose = PLAIN.model_copy(update={"max_gap_nats": 0.5})
    metrics, _ = take_step(tiny_model, batch, DR, loose, is_gate=True)
    assert metrics["trainer/fresh_gap_max_nats"] == pytest.approx(0.3, abs=1e-4)


def test_a_gradient_that_is_not_finite_leaves_the_weights_unchanged(tiny_model, network):
    policy = load_policy(tiny_model, PLAIN)
    before = {name: tensor.clone() for name, tensor in full_weights(policy).items()}
    sequences = select_sequences(make_batch(network), DR)
    sequences[0].advantages[0] = math.nan
    with pytest.raises(TrainerError, match="gradient norm is nan; the weights are unchanged"):
        run_step(policy, OptimizerSet(policy, PLAIN_SGD), sequences, DR, PLAIN, 1.0, is_gate=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(policy).items())


def test_gradients_above_the_largest_norm_are_scaled_down_to_it(tiny_model, network):
    batch = make_batch(network)
    _, free = take_step(tiny_model, batch, DR)
    norm = math.sqrt(sum(float(u.square().sum()) for u in free.values()))
    assert norm > 0.1
    clipped_sgd = PLAIN_SGD.model_copy(update={"max_grad_norm": norm / 4})
    metrics, clipped = take_step(tiny_model, batch, DR, PLAIN.model_copy(update={"optimizer": clipped_sgd}))
    assert metrics["trainer/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_moved_by(clipped, {name: -tensor / 4 for name, tensor in free.items()}, rtol=1e-3)


def test_metrics_of_mismatch_by_hand(tiny_model, network):
    batch = shift_one_token(make_batch(network, rewards=((1.0, 0.0),)), math.log(3))
    metrics, _ = take_step(tiny_model, batch, DR, PLAIN.model_copy(update={"max_gap_nats": 2.0}))
    tokens = batch.num_trained_tokens
    assert metrics["trainer/computed_tokens"] == tokens
    # One ratio is 3 (its weight capped to 2), all others are 1.
    assert metrics["trainer/kl_k3_nats"] == pytest.approx((3 - 1 - math.log(3)) / tokens, abs=1e-5)
    assert metrics["trainer/fresh_gap_mean_nats"] == pytest.approx(math.log(3) / tokens, abs=1e-5)
    assert metrics["trainer/effective_fraction"] == pytest.approx((tokens + 1) ** 2 / (tokens * (tokens + 3)), rel=1e-4)
    assert metrics["trainer/rejected_fraction"] == metrics["trainer/clipped_fraction"] == 0


@pytest.fixture(scope="module")
def examples(network) -> list:
    rng = np.random.default_rng(5)
    return [supervised_sequence(make_trajectory(network, rng)) for _ in range(4)]


@pytest.mark.parametrize("micro_batch", [15, 8192])
def test_a_supervised_step_follows_the_mean_likelihood_of_a_plain_loop(micro_batch, tiny_model, network, examples):
    total = -sum(plain_logprobs(network, s.token_ids, s.selected).sum() for s in examples)
    tokens = sum(len(s.selected) for s in examples)
    config = PLAIN.model_copy(update={"micro_batch_tokens": micro_batch})
    policy = load_policy(tiny_model, config)
    before = {name: tensor.clone() for name, tensor in full_weights(policy).items()}
    loss = run_supervised(policy, OptimizerSet(policy, PLAIN_SGD), examples, config, lr_scale=0.5)
    assert loss == pytest.approx(total.item(), rel=1e-5)
    update = {name: tensor - before[name] for name, tensor in full_weights(policy).items()}
    gradient = plain_gradient(network, total / tokens)
    assert_moved_by(update, {name: tensor / 2 for name, tensor in gradient.items()})


def test_measuring_the_supervised_loss_changes_nothing(tiny_model, examples):
    policy = load_policy(tiny_model, PLAIN)
    before = {name: tensor.clone() for name, tensor in full_weights(policy).items()}
    first = run_supervised(policy, None, examples, PLAIN, 0.0)
    assert run_supervised(policy, None, examples, PLAIN, 0.0) == first
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_weights(policy).items())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_steps_make_good_episodes_likelier_and_bad_ones_less_likely(tiny_model, network):
    batch = make_batch(network, rewards=((1.0, 0.0),))
    policy = load_policy(tiny_model, PLAIN)
    sequences = select_sequences(batch, DR)
    optimizer = OptimizerSet(policy, PLAIN_SGD)

    def nll(number: int) -> float:
        return run_supervised(policy, None, [sequences[number]], PLAIN, 0.0)

    good, bad = nll(0), nll(1)
    run_step(policy, optimizer, sequences, DR, PLAIN, 1.0, is_gate=True)
    assert nll(0) < good
    assert nll(1) > bad
