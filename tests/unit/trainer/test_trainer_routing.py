"""Routing replay against a loop over tokens and experts."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from routing_reference import live_experts, naive_logprobs, routed_sequences
from trainer_reference import PLAIN, PLAIN_SGD, Weights, assert_moved_by, plain_gradient, plain_network
from transformers import AutoConfig, PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.trainer.checkpoint import restore_checkpoint, save_checkpoint, stage_weights
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel, full_weights, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.packing import pack
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.sequence import TokenSequence, replayed_fraction
from agentrl.trainer.step import run_supervised
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.episode import Episode, Node, SampledColumns
from agentrl.types.errors import TrainerError
from agentrl.types.generation import RoutedExperts
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan

pytestmark = pytest.mark.usefixtures("process_group")

CHECKPOINTING = PLAIN.model_copy(update={"activation_checkpointing": True})


def supervised_update(model: Path, sequences: list[TokenSequence], config: TrainerConfig = PLAIN) -> Weights:
    """By how much one step of mean likelihood moves the weights: the negative gradient."""
    policy = load_policy(model, config)
    before = {name: tensor.clone() for name, tensor in full_weights(policy).items()}
    run_supervised(policy, OptimizerSet(policy, PLAIN_SGD), sequences, config, lr_scale=1.0)
    return {name: tensor - before[name] for name, tensor in full_weights(policy).items()}


def packed_logprobs(policy: PolicyModel, sequences: list[TokenSequence]) -> torch.Tensor:
    with torch.no_grad():
        return policy(pack(sequences, "cpu"), 1.0)


def without_routing(sequences: list[TokenSequence]) -> list[TokenSequence]:
    return [replace(s, routed_experts=None) for s in sequences]


@pytest.mark.parametrize("unknown", [0.0, 0.5])
def test_recorded_experts_give_the_log_probabilities_of_a_loop_over_experts(unknown, moe_model, moe_network):
    sequences = routed_sequences(moe_network, unknown=unknown)
    policy = load_policy(moe_model, PLAIN)
    replayed = packed_logprobs(policy, sequences)
    with torch.no_grad():
        torch.testing.assert_close(replayed, naive_logprobs(moe_network, sequences), rtol=1e-5, atol=5e-6)
    assert (replayed - packed_logprobs(policy, without_routing(sequences))).abs().max() > 0.1


@pytest.mark.parametrize("unknown", [0.0, 0.5])
def test_the_gradient_of_every_weight_is_that_of_the_loop_and_reaches_the_routers(unknown, moe_model, moe_network):
    sequences = routed_sequences(moe_network, unknown=unknown)
    gradient = plain_gradient(moe_network, -naive_logprobs(moe_network, sequences).mean())
    update = supervised_update(moe_model, sequences)
    assert_moved_by(update, gradient, atol=1e-6)
    routers = [name for name in gradient if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(float(update[name].abs().max()) > 1e-4 for name in routers)


@pytest.mark.parametrize("micro_batch", [1, 25, 8192])
def test_checkpointing_and_micro_batches_change_neither_loss_nor_gradient(micro_batch, moe_model, moe_network):
    sequences = routed_sequences(moe_network)
    plain = supervised_update(moe_model, sequences)
    config = CHECKPOINTING.model_copy(update={"micro_batch_tokens": micro_batch})
    update = supervised_update(moe_model, sequences, config)
    assert_moved_by(update, {name: -tensor for name, tensor in plain.items()}, atol=1e-6)


def test_a_block_that_is_computed_again_finds_the_experts_of_its_own_micro_batch(moe_model, moe_network):
    """Two forward passes, then their backward passes in the same order: what came by last belongs to the second."""
    sequences = routed_sequences(moe_network)
    gradients, passes = [], []
    for config in (PLAIN, CHECKPOINTING):
        policy, seen = load_policy(moe_model, config), []
        policy.network.model.layers[0].mlp.gate.register_forward_hook(lambda *_, s=seen: s.append(1))
        losses = [-policy(pack(part, "cpu"), 1.0).mean() for part in (sequences[:2], sequences[2:])]
        for loss in losses:
            loss.backward()
        passes.append(len(seen))
        gradients.append({n: p.grad.full_tensor() for n, p in policy.network.named_parameters()})
    assert passes == [2, 4]
    assert_moved_by({n: -g for n, g in gradients[1].items()}, gradients[0], atol=1e-6)


def test_replaying_what_the_routers_choose_anyway_changes_no_bit(moe_model, moe_network):
    sequences = without_routing(routed_sequences(moe_network))
    policy = load_policy(moe_model, PLAIN)
    live = [replace(s, routed_experts=live_experts(moe_network, s.token_ids)) for s in sequences]
    nothing = [replace(s, routed_experts=np.full((len(s.token_ids), 2, 2), -1, np.int16)) for s in sequences]
    expected = packed_logprobs(policy, sequences)
    assert torch.equal(packed_logprobs(policy, live), expected)
    assert torch.equal(packed_logprobs(policy, nothing), expected)
    assert torch.equal(packed_logprobs(policy, [live[0], *sequences[1:]]), expected)


def test_weights_of_a_model_that_does_not_normalise_are_not_normalised(moe_model, moe_network, tmp_path):
    folder = shutil.copytree(moe_model, tmp_path / "model")
    config = AutoConfig.from_pretrained(moe_model)
    config.norm_topk_prob = False
    config.save_pretrained(folder)
    sequences = without_routing(routed_sequences(moe_network))
    live = [replace(s, routed_experts=live_experts(plain_network(folder), s.token_ids)) for s in sequences]
    policy = load_policy(folder, PLAIN)
    assert torch.equal(packed_logprobs(policy, live), packed_logprobs(policy, sequences))
    normalised = packed_logprobs(load_policy(moe_model, PLAIN), sequences)
    assert (packed_logprobs(policy, live) - normalised).abs().max() > 0.01


def aborted_episode(rng: np.random.Generator) -> tuple[Episode, np.ndarray]:
    """Prompt of 3, a reply of 6 that was interrupted behind its second token; rows of both engines."""
    old, new = (rng.integers(0, 4, (9, 2, 2)) * 2 + np.asarray([0, 1]) for _ in range(2))
    routed = RoutedExperts.concatenate([RoutedExperts.narrow(0, old[:4]), RoutedExperts.narrow(4, new[4:8])])
    spans = (VersionSpan(PolicyVersion(0, 0), 0, 2), VersionSpan(PolicyVersion(0, 1), 2, 6))
    prompt = Node(0, None, "agent", 0, rng.integers(0, 300, 3).astype(np.int32))
    sample = SampledColumns(np.full(6, -5.0, np.float32), spans, spans, None, routed)
    reply = Node(1, 0, "agent", 0, rng.integers(0, 300, 6).astype(np.int32), sample)
    plain = build_episode(build_ticket(), [(1, 0)])
    return Episode(plain.ticket, plain.agents, (prompt, reply), ()), np.concatenate([old[:4], new[4:8]])


def test_after_an_abort_each_position_computes_with_the_experts_of_the_weights_that_drew_its_successor(moe_model):
    rng = np.random.default_rng(0)
    episodes, rows = zip(*(aborted_episode(rng) for _ in range(2)), strict=True)
    trained = []
    for number, episode in enumerate(episodes):
        (trajectory,) = build_trajectories(episode)
        whole = TrainTrajectory(trajectory, trajectory.sampled, np.zeros(9, np.int32))
        trained.append(TrainEpisode(f"e{number}", 0, float(number), (whole,)))
    sequences = select_sequences(TrainBatch("main", PolicyVersion(0, 1), tuple(trained)), AlgorithmConfig())
    policy = load_policy(moe_model, PLAIN)
    used: list[torch.Tensor] = []
    for layer in policy.network.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _m, args: used.append(args[1].clone()))
    packed_logprobs(policy, sequences)
    for number in range(2):
        assert used[number][:8].tolist() == rows[0][:, number].tolist()
        assert used[number][9:17].tolist() == rows[1][:, number].tolist()
    assert replayed_fraction(sequences) == pytest.approx(16 / 18)


def nearly_tied(network: PreTrainedModel, spread: float, seed: int) -> PreTrainedModel:
    """A copy whose routers hold two directions, four experts to each, apart by noise of the given size."""
    tied = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in tied.model.layers:
            weight = layer.mlp.gate.weight
            weight.copy_(weight[:2].repeat_interleave(4, 0) + spread * torch.randn(weight.shape, generator=generator))
    return tied


def test_a_perturbed_router_moves_log_probabilities_100_times_less_with_replay(moe_model, moe_network, tmp_path):
    """Engine and trainer differ only in router noise of 1e-5, at near-ties that such noise decides."""
    trainer_side = nearly_tied(moe_network, 1e-5, seed=1)
    engine_side = nearly_tied(moe_network, 1e-5, seed=2)
    trainer_side.save_pretrained(tmp_path / "model")
    sequences = without_routing(routed_sequences(moe_network, count=8))
    with torch.no_grad():
        engine = packed_logprobs(load_policy_of(engine_side, tmp_path / "engine"), sequences)
    recorded = [replace(s, routed_experts=live_experts(engine_side, s.token_ids)) for s in sequences]
    policy = load_policy(tmp_path / "model", PLAIN)
    off = (packed_logprobs(policy, sequences) - engine).abs().mean()
    on = (packed_logprobs(policy, recorded) - engine).abs().mean()
    assert off > 0.01
    assert off > 100 * on


def load_policy_of(network: PreTrainedModel, folder: Path) -> PolicyModel:
    network.save_pretrained(folder)
    return load_policy(folder, PLAIN)


def test_a_record_of_other_experts_than_the_models_is_refused(moe_model, moe_network, tiny_model):
    (sequence,) = routed_sequences(moe_network, count=1)
    policy = load_policy(moe_model, PLAIN)
    three = replace(sequence, routed_experts=np.repeat(sequence.routed_experts, 2, 2)[:, :, :3])
    with pytest.raises(ValueError, match=r"layer 0 have shape .*3\), the model chooses .*2\)"):
        packed_logprobs(policy, [three])
    with pytest.raises(TrainerError, match="recorded for 4 layers; the model has 2"):
        packed_logprobs(policy, [replace(sequence, routed_experts=np.repeat(sequence.routed_experts, 2, 1))])
    with pytest.raises(TrainerError, match=r"expert 8 is recorded; the model has 8 in each layer"):
        packed_logprobs(policy, [replace(sequence, routed_experts=np.full_like(sequence.routed_experts, 8))])
    with pytest.raises(TrainerError, match=r"Qwen3ForCausalLM has no router .*routed_experts=false"):
        packed_logprobs(load_policy(tiny_model, PLAIN), [sequence])


def test_a_model_of_experts_goes_through_disk_and_checkpoint_to_the_last_bit(moe_model, moe_network, tmp_path):
    sequences = routed_sequences(moe_network)
    config = TrainerConfig()
    policies = [load_policy(moe_model, config) for _ in range(2)]
    optimizers = [OptimizerSet(policy, config.optimizer) for policy in policies]
    run_supervised(policies[0], optimizers[0], sequences, config, 1e3)
    manifest = stage_weights(policies[0], moe_model, "main", PolicyVersion(0, 1), tmp_path / "v1")
    save_checkpoint(policies[0], optimizers[0], tmp_path / "v1")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in manifest.checksums
    loaded = dict(plain_network(tmp_path / "v1").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in full_weights(policies[0]).items())
    restore_checkpoint(policies[1], optimizers[1], tmp_path / "v1")
    for policy, optimizer in zip(policies, optimizers, strict=True):
        run_supervised(policy, optimizer, sequences, config, 1e3)
    mine, other = (full_weights(policy) for policy in policies)
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
