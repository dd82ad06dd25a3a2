from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.models.drawing import write_drawn_model
from agentrl.testing.tiny_architectures import tiny_config
from agentrl.testing.tiny_moe import make_tiny_moe_model
from agentrl.weights.experts import ExpertNames, join_experts, split_experts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = make_tiny_moe_model(tmp_path_factory.mktemp("moe") / "model")
    return folder, load_file(folder / "model.safetensors")


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def test_names_of_a_loaded_model_become_those_that_transformers_itself_writes(files):
    folder, on_disk = files
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert same(split_experts(loaded), on_disk)
    assert same(join_experts(on_disk), loaded)
    assert "model.layers.1.mlp.experts.gate_up_proj" in loaded
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in on_disk


def test_single_experts_share_the_memory_of_their_layer_and_can_be_written(files, tmp_path):
    joined = join_experts(files[1])
    single = split_experts(joined)
    whole = joined["model.layers.0.mlp.experts.down_proj"]
    assert single["model.layers.0.mlp.experts.0.down_proj.weight"].data_ptr() == whole.data_ptr()
    save_file(single, tmp_path / "model.safetensors")
    assert same(load_file(tmp_path / "model.safetensors"), files[1])


def test_a_layer_that_lacks_an_expert_is_refused_by_name(files):
    damaged = dict(files[1])
    del damaged["model.layers.0.mlp.experts.3.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts lacks 1 tensors, such as 3\.up_proj"):
        join_experts(damaged)


def test_weights_without_experts_stay_as_they_are():
    plain = {"model.layers.0.mlp.gate_proj.weight": torch.ones(2), "lm_head.weight": torch.zeros(1)}
    assert same(split_experts(plain), plain)
    assert same(join_experts(plain), plain)


FAMILIES = ["mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "qwen3_moe"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_written_by_the_names_that_transformers_itself_writes(model_type, tmp_path):
    write_drawn_model(tiny_config(model_type), tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    names = ExpertNames.of(model_type)
    assert same(split_experts(loaded, names), on_disk)
    assert same(join_experts(on_disk, names), loaded)
