"""Adapters against plain transformers with merged weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_reference import PLAIN, PLAIN_SGD, Weights, assert_moved_by, make_trajectory, plain_logprobs, plain_network
from transformers import PreTrainedModel

from agentrl.inference.checksum import tensor_checksum
from agentrl.trainer.adapter import stage_adapter
from agentrl.trainer.checkpoint import restore_checkpoint, save_checkpoint, stage_weights
from agentrl.trainer.config import LoraConfig, OptimizerConfig, TrainerConfig
from agentrl.trainer.model import PolicyModel, assign_weights, full_weights, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence, supervised_sequence
from agentrl.trainer.step import run_supervised
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import PolicyVersion
from agentrl.weights.adapter import ADAPTER_FOLDER

pytestmark = pytest.mark.usefixtures("process_group")

LORA = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "v_proj", "down_proj"))
ADAPTED = PLAIN.model_copy(update={"lora": LORA})
V1 = PolicyVersion(0, 1)


@pytest.fixture(scope="module")
def examples(network: PreTrainedModel) -> list[TokenSequence]:
    rng = np.random.default_rng(5)
    return [supervised_sequence(make_trajectory(network, rng)) for _ in range(4)]


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def stirred(policy: PolicyModel, seed: int = 0) -> Weights:
    """Give every adapter weights that matter; returns them."""
    generator = torch.Generator().manual_seed(seed)
    adapters = {
        name: 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in policy.network.named_parameters()
        if is_adapter(name)
    }
    assign_weights(policy, adapters)
    return adapters


def logprobs_of(policy: PolicyModel, examples: list[TokenSequence]) -> torch.Tensor:
    with torch.no_grad():
        return policy(pack(examples, "cpu"), 1.0)


def merged(network: PreTrainedModel, adapters: Weights) -> Weights:
    """W + (6 / 3) B A of each adapted layer, as a person would write it."""
    layers = {name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")}
    base = dict(network.named_parameters())
    return {
        f"{layer}.weight": base[f"{layer}.weight"] + 2.0 * adapters[f"{layer}.lora_B"] @ adapters[f"{layer}.lora_A"]
        for layer in layers
    }


class Merged:
    """Plain transformers, computing with other weights in some layers."""

    def __init__(self, network: PreTrainedModel, weights: Weights) -> None:
        self._network, self._weights = network, weights

    def __call__(self, ids: torch.Tensor) -> Any:
        return torch.func.functional_call(self._network, self._weights, (ids,))


def test_a_policy_with_fresh_adapters_is_its_base_to_the_last_bit(tiny_model, examples):
    base, adapted = load_policy(tiny_model, PLAIN), load_policy(tiny_model, ADAPTED)
    assert torch.equal(logprobs_of(adapted, examples), logprobs_of(base, examples))
    other = load_policy(tiny_model, ADAPTED)
    mine, theirs = full_weights(adapted), full_weights(other)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert sum(is_adapter(name) for name in mine) == 2 * 2 * 3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_the_adapters_is_that_of_merged_weights(checkpointing, tiny_model, network, examples):
    config = ADAPTED.model_copy(update={"activation_checkpointing": checkpointing})
    policy = load_policy(tiny_model, config)
    adapters = {name: tensor.requires_grad_() for name, tensor in stirred(policy).items()}
    before = {name: tensor.clone() for name, tensor in full_weights(policy).items()}
    plain = Merged(network, merged(network, adapters))
    logprobs = torch.cat([plain_logprobs(plain, s.token_ids, s.selected) for s in examples])
    gradient = dict(zip(adapters, torch.autograd.grad(-logprobs.mean(), list(adapters.values())), strict=True))
    torch.testing.assert_close(logprobs_of(policy, examples), logprobs.detach(), rtol=1e-5, atol=5e-6)
    run_supervised(policy, OptimizerSet(policy, PLAIN_SGD), examples, config, lr_scale=1.0)
    update = {name: tensor - before[name] for name, tensor in full_weights(policy).items()}
    assert_moved_by({n: t for n, t in update.items() if is_adapter(n)}, gradient, atol=1e-6)
    assert all(float(gradient[name].abs().max()) > 1e-4 for name in gradient)
    assert not any(tensor.any() for name, tensor in update.items() if not is_adapter(name))


def test_what_is_staged_is_an_adapter_as_peft_writes_it(tiny_model, tmp_path):
    policy = load_policy(tiny_model, ADAPTED)
    adapters = stirred(policy)
    manifest = stage_adapter(policy, tiny_model, "main", V1, LORA, tmp_path / "v1")
    assert sorted(file.name for file in (tmp_path / "v1").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "digests.json",
    ]
    staged = load_file(tmp_path / "v1" / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(staged[first], adapters["model.layers.0.self_attn.q_proj.lora_A"])
    assert (staged[first].shape, len(staged)) == ((3, 32), 12)
    last = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(staged[last], adapters["model.layers.1.mlp.down_proj.lora_B"])
    settings = json.loads((tmp_path / "v1" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 3, 6.0)
    assert settings["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert settings["base_model_name_or_path"] == str(tiny_model)
    assert (manifest.kind, manifest.version, manifest.path) == ("adapter", V1, str(tmp_path / "v1"))
    assert manifest.checksums == {name: tensor_checksum(tensor) for name, tensor in staged.items()}
    assert manifest.num_bytes == sum(4 * tensor.numel() for tensor in staged.values())


def test_a_merged_export_is_the_base_plus_the_adapters_and_loads_as_a_model(tiny_model, network, examples, tmp_path):
    policy = load_policy(tiny_model, ADAPTED)
    adapters = stirred(policy)
    manifest = stage_weights(policy, tiny_model, "main", V1, tmp_path / "v1")
    assert manifest.kind == "full"
    loaded = plain_network(tmp_path / "v1")
    expected = dict(network.named_parameters()) | merged(network, adapters)
    weights = dict(loaded.named_parameters())
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
    with torch.no_grad():
        alone = torch.cat([plain_logprobs(loaded, s.token_ids, s.selected) for s in examples])
    torch.testing.assert_close(logprobs_of(policy, examples), alone, rtol=1e-5, atol=5e-6)


class Training:
    """A policy with adapters and its optimizer."""

    def __init__(self, model: Path, kind: str, lora: LoraConfig = LORA) -> None:
        optimizer = OptimizerConfig(kind=kind, learning_rate=0.01, weight_decay=0.1)
        self.config = TrainerConfig(optimizer=optimizer, lora=lora)
        self.model, self.lora = model, lora
        self.policy = load_policy(model, self.config)
        self.optimizer = OptimizerSet(self.policy, optimizer)

    def step(self, examples: list[TokenSequence]) -> None:
        run_supervised(self.policy, self.optimizer, examples, self.config, lr_scale=1.0)

    def save(self, folder: Path) -> None:
        stage_weights(self.policy, self.model, "main", V1, folder)
        stage_adapter(self.policy, self.model, "main", V1, self.lora, folder / ADAPTER_FOLDER)
        save_checkpoint(self.policy, self.optimizer, folder)

    def weights(self) -> Weights:
        return {name: tensor.clone() for name, tensor in full_weights(self.policy).items()}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
def test_training_of_adapters_goes_on_from_a_checkpoint_to_the_last_bit(kind, tiny_model, examples, tmp_path):
    first, second = Training(tiny_model, kind), Training(tiny_model, kind)
    start = first.weights()
    first.step(examples[:2])
    first.save(tmp_path / "checkpoint")
    first.step(examples[2:])
    restore_checkpoint(second.policy, second.optimizer, tmp_path / "checkpoint")
    second.step(examples[2:])
    mine, other = first.weights(), second.weights()
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    moved = {name for name in mine if not torch.equal(mine[name], start[name])}
    assert moved == {name for name in mine if is_adapter(name)}


@pytest.mark.parametrize("damage", ["other rank", "other layers", "whole model", "cut"])
def test_a_checkpoint_of_other_adapters_is_refused_and_changes_nothing(damage, tiny_model, examples, tmp_path):
    training, folder = Training(tiny_model, "sgd"), tmp_path / "checkpoint"
    other = {
        "other rank": LORA.model_copy(update={"rank": 2}),
        "other layers": LORA.model_copy(update={"target_modules": ("k_proj",)}),
    }
    Training(tiny_model, "sgd", other.get(damage, LORA)).save(folder)
    file = folder / ADAPTER_FOLDER / "adapter_model.safetensors"
    if damage == "whole model":
        file.unlink()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:200])
    before = training.weights()
    with pytest.raises(StorageError, match=r"is of another model|cannot be read"):
        restore_checkpoint(training.policy, training.optimizer, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in training.weights().items())


@pytest.mark.parametrize("target", ["lm_head", "qproj"])
def test_a_layer_that_is_not_in_the_blocks_is_a_configuration_error_that_names_those_that_are(target, tiny_model):
    config = ADAPTED.model_copy(update={"lora": LoraConfig(target_modules=("q_proj", target))})
    there = re.escape("down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj")
    with pytest.raises(ConfigError, match=f"target_modules: the blocks have no linear layer {target}; .*{there}"):
        load_policy(tiny_model, config)


def test_adapters_on_the_attention_of_a_model_of_experts_leave_its_experts_alone(moe_model, examples):
    training = Training(moe_model, "adamw", LoraConfig(rank=2))
    start = training.weights()
    training.step(examples)
    moved = {name for name, tensor in training.weights().items() if not torch.equal(tensor, start[name])}
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "k_proj", "v_proj", "o_proj"}
