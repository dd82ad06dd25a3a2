"""Expert weights by two names: all of a layer in one tensor, as transformers computes, or each by itself, as on disk.

Files and SGLang know ``...mlp.experts.3.gate_proj.weight``; a loaded model of the Qwen and OLMoE families has
``...mlp.experts.gate_up_proj`` [experts, 2 * width, hidden] and ``...mlp.experts.down_proj`` [experts, hidden,
width]. SGLang ignores a name that it does not know, so weights must leave under the names of the files.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def split_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights by the names of files; the tensors of single experts are views. Other names stay."""
    single: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            single[name] = tensor
            continue
        prefix, kind = match.groups()
        for number, expert in enumerate(tensor.unbind(0)):
            parts = {"gate": 0, "up": 1} if kind == "gate_up_proj" else {"down": 0}
            for part, index in parts.items():
                single[f"{prefix}.{number}.{part}_proj.weight"] = expert.chunk(len(parts), 0)[index]
    return single


def join_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights by the names of a loaded model; the inverse of `split_experts`.

    Raises:
        ValueError: a layer lacks a tensor of one of its experts.
    """
    joined: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = defaultdict(dict)
    for name, tensor in weights.items():
        match = _SINGLE.fullmatch(name)
        if match is None:
            joined[name] = tensor
        else:
            layers[match[1]][int(match[2]), match[3]] = tensor
    for prefix, parts in layers.items():
        numbers = range(1 + max(number for number, _ in parts))
        missing = [f"{n}.{part}_proj" for n in numbers for part in ("gate", "up", "down") if (n, part) not in parts]
        if missing:
            raise ValueError(f"{prefix} lacks {len(missing)} tensors, such as {missing[0]}")
        halves = [torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in numbers]
        joined[f"{prefix}.gate_up_proj"] = torch.stack(halves)
        joined[f"{prefix}.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    return joined
