"""Adapters on disk, in the form of PEFT, which SGLang and the embedded engine load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.trainer.config import LoraConfig
from agentrl.trainer.lora import adapters_of
from agentrl.trainer.model import PolicyModel, full_weights
from agentrl.trainer.staging import new_folder
from agentrl.types.batch import WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.weights.digests import write_digests

_WEIGHTS = "adapter_model.safetensors"
_SETTINGS = "adapter_config.json"
_PREFIX = "base_model.model."


def stage_adapter(
    policy: PolicyModel, source: Path, name: str, version: PolicyVersion, config: LoraConfig, folder: Path
) -> WeightsManifest:
    """Write the adapters to a new folder, for engines that serve the base model `source`. All ranks must call.

    Rank 0 writes; the folder appears under its name only when it is complete.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    weights = {_peft_name(n): t for n, t in full_weights(policy, adapter_names(policy)).items()}
    if dist.get_rank() != 0:
        return WeightsManifest(name, version, str(folder), {}, 0, kind="adapter")
    with new_folder(folder, version) as staging:
        save_file(weights, staging / _WEIGHTS, metadata={"format": "pt"})
        (staging / _SETTINGS).write_text(json.dumps(_settings(config, source), indent=2) + "\n")
        write_digests(staging)
    num_bytes = sum(t.numel() * t.element_size() for t in weights.values())
    checksums = {n: tensor_checksum(tensor) for n, tensor in weights.items()}
    return WeightsManifest(name, version, str(folder), checksums, num_bytes, kind="adapter")


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of what `stage_adapter` wrote, by their names in the policy. Raises OSError or SafetensorError."""
    found = load_file(folder / _WEIGHTS)
    return {name.removeprefix(_PREFIX).removesuffix(".weight"): tensor for name, tensor in found.items()}


def adapter_names(policy: PolicyModel) -> list[str]:
    """Parameters of a policy that are adapters; none if it is trained whole."""
    return [f"{name}.{part}" for name in adapters_of(policy.network) for part in ("lora_A", "lora_B")]


def _peft_name(name: str) -> str:
    """``model.layers.0.mlp.up_proj.lora_A`` as PEFT names it."""
    return f"{_PREFIX}{name}.weight"


def _settings(config: LoraConfig, source: Path) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
