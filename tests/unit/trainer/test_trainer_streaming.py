"""Weights leave the trainer parameter by parameter: the same file as all at once, without ever holding all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agentrl.trainer import checkpoint
from agentrl.trainer.config import LoraConfig, TrainerConfig
from agentrl.trainer.model import full_weights, load_policy
from agentrl.trainer.streaming import MOST_AT_ONCE, weight_checksums, whole_parameters, write_weights
from agentrl.types.errors import StorageError
from agentrl.types.version import PolicyVersion
from agentrl.weights.experts import split_experts

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("kind", ["tiny", "odd", "moe"])
def test_the_file_is_what_safetensors_writes_of_all_weights(kind, tiny_model, odd_model, moe_model, tmp_path: Path):
    policy = load_policy({"tiny": tiny_model, "odd": odd_model, "moe": moe_model}[kind], TrainerConfig())
    written = write_weights(policy, whole_parameters(policy), tmp_path / "streamed.safetensors")
    expected = {name: tensor.contiguous() for name, tensor in split_experts(full_weights(policy)).items()}
    save_file(expected, tmp_path / "at-once.safetensors", metadata={"format": "pt"})
    streamed, at_once = (load_file(tmp_path / f"{name}.safetensors") for name in ("streamed", "at-once"))
    assert streamed.keys() == at_once.keys()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in at_once.items())
    assert written.checksums == weight_checksums(expected)
    assert written.num_bytes == sum(4 * tensor.numel() for tensor in expected.values())
    with safe_open(tmp_path / "streamed.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    size = (tmp_path / "streamed.safetensors").stat().st_size
    assert size - written.num_bytes < 200 * len(expected) + 100


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))])
def test_only_a_few_whole_parameters_are_alive_at_once(lora, tiny_model, tmp_path: Path):
    policy = load_policy(tiny_model, TrainerConfig(lora=lora))
    alive: set[int] = set()
    most = 0

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number, (name, whole) in enumerate(whole_parameters(policy)):
            memory = whole.detach().numpy().copy()  # tensors made of it keep it alive
            alive.add(number)
            weakref.finalize(memory, alive.discard, number)
            most = max(most, len(alive))
            whole = torch.from_numpy(memory)
            del memory
            yield name, whole
            del whole

    gc.disable()  # nothing may wait for it
    try:
        write_weights(policy, watched(), tmp_path / "model.safetensors")
    finally:
        gc.enable()
    assert len(list(policy.network.named_parameters())) > 3 * MOST_AT_ONCE
    assert most <= MOST_AT_ONCE


def test_a_disk_that_is_full_is_told_when_every_parameter_has_been_gathered(tiny_model, tmp_path: Path, monkeypatch):
    policy = load_policy(tiny_model, TrainerConfig())
    gathered: list[str] = []

    def noted(policy) -> Iterator[tuple[str, torch.Tensor]]:
        for name, whole in whole_parameters(policy):
            gathered.append(name)
            yield name, whole

    monkeypatch.setattr(checkpoint, "whole_parameters", noted)
    monkeypatch.setattr("agentrl.trainer.streaming.tensor_checksum", _full_disk)
    with pytest.raises(StorageError, match=r"weights 0\.1 cannot be written to .*v1.*No space left"):
        checkpoint.stage_weights(policy, tiny_model, "main", PolicyVersion(0, 1), tmp_path / "v1")
    assert gathered == [name for name, _ in whole_parameters(policy)]
    assert not (tmp_path / "v1").exists()


def _full_disk(_tensor: torch.Tensor) -> str:
    raise OSError(28, "No space left on device")
