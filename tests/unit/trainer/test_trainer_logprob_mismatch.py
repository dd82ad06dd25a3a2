"""The gap of fresh tokens with and without the replay contract."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from routing_reference import random_experts, routed_by
from trainer_reference import PLAIN, make_batch, make_trajectory, plain_logprobs
from transformers import PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.trainer.logprob_mismatch import no_replay_gap
from agentrl.trainer.model import load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.sequence import TokenSequence, supervised_sequence
from agentrl.trainer.step import run_step

pytestmark = pytest.mark.usefixtures("process_group")

DR = AlgorithmConfig(advantage="dr_grpo")


def engine_sequences(network: PreTrainedModel) -> list[TokenSequence]:
    """Sequences with log-probabilities under experts of their own; the last sequence is stale."""
    rng = np.random.default_rng(3)
    sequences = []
    for number in range(4):
        sequence = supervised_sequence(make_trajectory(network, rng))
        experts = random_experts(rng, len(sequence.token_ids))
        with torch.no_grad(), routed_by(network, experts):
            logprobs = plain_logprobs(network, sequence.token_ids, sequence.selected).numpy()
        staleness = np.full(len(sequence.selected), number == 3, np.int32)
        sequences.append(dataclasses.replace(sequence, routed_experts=experts, logprobs=logprobs, staleness=staleness))
    return sequences


@pytest.mark.parametrize("micro_batch", [1, 8192])
def test_the_report_is_the_distance_of_fresh_tokens_from_the_live_model(micro_batch, moe_model, moe_network):
    sequences = engine_sequences(moe_network)
    config = PLAIN.model_copy(update={"micro_batch_tokens": micro_batch})
    policy = load_policy(moe_model, config)
    with torch.no_grad():
        distances = torch.cat(
            [plain_logprobs(moe_network, s.token_ids, s.selected) - torch.from_numpy(s.logprobs) for s in sequences[:3]]
        ).abs()
    report = no_replay_gap(policy, sequences, config, 1.0)
    assert report["trainer/fresh_gap_mean_no_replay_nats"] == pytest.approx(float(distances.mean()), rel=1e-3)
    assert report["trainer/fresh_gap_max_no_replay_nats"] == pytest.approx(float(distances.max()), rel=1e-3)
    assert report["trainer/fresh_gap_mean_no_replay_nats"] > 0.1
    metrics = run_step(policy, OptimizerSet(policy, config.optimizer), sequences, DR, config, 1.0, is_gate=True)
    assert metrics["trainer/fresh_gap_max_nats"] < 1e-4
    assert metrics["trainer/replayed_fraction"] == pytest.approx(
        sum(len(s.token_ids) - 1 for s in sequences) / sum(len(s.token_ids) for s in sequences)
    )


def test_kept_sets_are_off_in_the_report_and_on_in_the_step(tiny_model, network):
    batch = make_batch(network, kept_size=4)
    policy = load_policy(tiny_model, PLAIN)
    sequences = select_sequences(batch, DR)
    report = no_replay_gap(policy, sequences, PLAIN, 1.0)
    metrics = run_step(policy, OptimizerSet(policy, PLAIN.optimizer), sequences, DR, PLAIN, 1.0, is_gate=True)
    assert report["trainer/fresh_gap_mean_no_replay_nats"] > 1.0
    assert metrics["trainer/fresh_gap_mean_nats"] < 1e-5


def test_without_fresh_tokens_there_is_nothing_to_report(tiny_model, network):
    sequences = select_sequences(make_batch(network, staleness=2), DR)
    assert no_replay_gap(load_policy(tiny_model, PLAIN), sequences, PLAIN, 1.0) == {}
