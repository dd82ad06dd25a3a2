"""Expert weights by two names: all of a layer in one tensor, as transformers computes, or as files have them.

A loaded model has ``...mlp.experts.gate_up_proj`` [experts, 2 * width, hidden] and ``...mlp.experts.down_proj``
[experts, hidden, width]. Files and SGLang know ``...mlp.experts.3.gate_proj.weight`` (Qwen, OLMoE, DeepSeek, GLM) or
``...block_sparse_moe.experts.3.w1.weight`` (Mixtral), or the fused tensors themselves (GPT-OSS). SGLang and AutoModel
ignore a name that they do not know, so weights must leave under the names of the files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_FUSED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
_INSIDE = ".mlp."


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How the files of a family name a layer's `block` of experts, and the three matrices of each.

    Example: Mixtral's files have ``model.layers.0.block_sparse_moe.experts.3.w1.weight`` for the gate of expert 3.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_fused: bool = False

    @classmethod
    def of(cls, model_type: str) -> ExpertNames:
        """By the type that ``config.json`` gives; the trainer's check compares them with what transformers writes."""
        return _FAMILIES.get(model_type, cls())


_FAMILIES = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "gpt_oss": ExpertNames(is_fused=True),
}
_PLAIN = ExpertNames()


def split_experts(weights: Mapping[str, torch.Tensor], names: ExpertNames = _PLAIN) -> dict[str, torch.Tensor]:
    """Weights by the names of files; the tensors of single experts are views. Other names stay."""
    if names.is_fused:
        return dict(weights)
    single: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            single[name.replace(_INSIDE, f".{names.block}.")] = tensor
            continue
        prefix, kind = match.groups()
        parts = (names.gate, names.up) if kind == "gate_up_proj" else (names.down,)
        for number, expert in enumerate(tensor.unbind(0)):
            for part, matrix in zip(parts, expert.chunk(len(parts), 0), strict=True):
                single[f"{prefix}.{names.block}.experts.{number}.{part}.weight"] = matrix
    return single


def join_experts(weights: Mapping[str, torch.Tensor], names: ExpertNames = _PLAIN) -> dict[str, torch.Tensor]:
    """Weights by the names of a loaded model; the inverse of `split_experts`.

    Raises:
        ValueError: a layer lacks a tensor of one of its experts.
    """
    if names.is_fused:
        return dict(weights)
    parts = (names.gate, names.up, names.down)
    pattern = re.compile(rf"(.*)\.{names.block}\.experts\.(\d+)\.({'|'.join(parts)})\.weight")
    joined: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        match = pattern.fullmatch(name)
        if match is None:
            joined[name.replace(f".{names.block}.", _INSIDE)] = tensor
        else:
            layers[match[1]][int(match[2]), match[3]] = tensor
    for prefix, matrices in layers.items():
        numbers = range(1 + max(number for number, _ in matrices))
        missing = [f"{n}.{part}" for n in numbers for part in parts if (n, part) not in matrices]
        if missing:
            raise ValueError(f"{prefix}.{names.block}.experts lacks {len(missing)} tensors, such as {missing[0]}")
        halves = [torch.cat([matrices[n, names.gate], matrices[n, names.up]]) for n in numbers]
        joined[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(halves)
        joined[f"{prefix}.mlp.experts.down_proj"] = torch.stack([matrices[n, names.down] for n in numbers])
    return joined
