"""Reads LoRA adapters as PEFT writes them: a configuration, and pairs of matrices by module name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from agentrl.engine.files import Pace, read_file, read_tensors
from agentrl.engine.request import BadRequestError

_MATRIX_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Settings that change what an adapter computes, and the values of them that leave it A and B alone.
_PLAIN = {
    "peft_type": (None, "LORA"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What an adapter adds to one linear module: ``scale * x @ A.T @ B.T``.

    Example: rank 8 on a projection from 64 to 32 features has A [8, 64] and B [32, 8].
    """

    a_RI: torch.Tensor
    b_OR: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """Matrices by module name, and the factor of every change."""

    pairs: Mapping[str, LoraPair]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Of all its matrices."""
        return max(len(pair.a_RI) for pair in self.pairs.values())


def read_adapter(folder: Path, max_rank: int, pace: Pace) -> LoraAdapter:
    """The adapter in a PEFT folder. Raises as `read_tensors` and `parse_adapter`."""
    config = orjson.loads(read_file(folder / "adapter_config.json", pace))
    return parse_adapter(config, read_tensors(folder / "adapter_model.safetensors", pace), max_rank)


def parse_adapter(config: Any, tensors: Mapping[str, torch.Tensor], max_rank: int) -> LoraAdapter:
    """An adapter as PEFT stores it; the tensors become part of it.

    Raises:
        BadRequestError: not plain LoRA, a rank above `max_rank`, a tensor of another kind, half a pair, or none.
    """
    rank, scale = _rank_and_scale(config, max_rank)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _MATRIX_NAME.fullmatch(name)
        if match is None:
            raise BadRequestError(f"tensor {name} is no matrix of a LoRA adapter")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise BadRequestError("the adapter has no tensors")
    for module, pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise BadRequestError(f"the adapter has only lora_{next(iter(pair))} of {module}")
        if any(t.ndim != 2 or not t.is_floating_point() for t in pair.values()):
            raise BadRequestError(f"the adapter's tensors of {module} are no matrices of floating-point numbers")
        if (pair["A"].shape[0], pair["B"].shape[1]) != (rank, rank):
            shapes = f"{tuple(pair['A'].shape)} and {tuple(pair['B'].shape)}"
            raise BadRequestError(f"the adapter's matrices of {module} have shapes {shapes}, not those of rank {rank}")
    return LoraAdapter({module: LoraPair(pair["A"], pair["B"]) for module, pair in sides.items()}, scale)


def _rank_and_scale(config: Any, max_rank: int) -> tuple[int, float]:
    """Rank, and alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (Kalajdzievski 2023, section 3)."""
    if not isinstance(config, dict):
        raise BadRequestError("an adapter's configuration must be a JSON object")
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise BadRequestError(f"the adapter has {key}={config[key]!r}; only plain LoRA is served")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise BadRequestError("an adapter's configuration needs r, an integer above 0, and lora_alpha, a number")
    if rank > max_rank:
        raise BadRequestError(f"the adapter's rank {rank} is above --max-lora-rank {max_rank}")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)
