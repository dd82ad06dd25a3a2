"""Adapters in PEFT's form, and models with adapters merged into their weights: the reference for serving them."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MadeAdapter:
    """A PEFT folder, and a folder of the base model with the adapter merged into it."""

    folder: Path
    merged: Path

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "adapter_config.json").read_text())

    @property
    def payload(self) -> str:
        """The tensors as the route for tensors takes them."""
        return base64.b64encode(pickle.dumps(self.tensors)).decode()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "adapter_model.safetensors")


def make_adapter(
    model: Path, folder: Path, seed: int, rank: int = 4, modules: tuple[str, ...] = ALL_MODULES, alpha: float = 8.0
) -> MadeAdapter:
    """Write a random adapter of a model's modules, large enough to change what it says."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    adapter: dict[str, torch.Tensor] = {}
    for name in [n for n in weights if n.split(".")[-2] in modules]:
        out_features, in_features = weights[name].shape
        a = torch.randn(rank, in_features, generator=generator) * 0.15
        b = torch.randn(out_features, rank, generator=generator) * 0.15
        module = name.removesuffix(".weight")
        adapter |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        weights[name] = weights[name] + b @ a * (alpha / rank)
    (folder / "adapter").mkdir(parents=True)
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    config |= {"lora_dropout": 0.0, "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model)}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(model, folder / "merged")
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})
    return MadeAdapter(folder / "adapter", folder / "merged")
