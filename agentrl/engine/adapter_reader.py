"""Reads the tensors of LoRA adapters, each where its file says that it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from agentrl.engine.adapter_file import AdapterFile

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies in a file of safetensors, in bytes behind the header."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def read_tensors(file: AdapterFile) -> dict[str, torch.Tensor]:
    """All tensors of an open adapter, in memory of their own.

    Raises:
        ValueError: the file is cut off, or a tensor does not lie in it as is said.
        msgspec.DecodeError: the header is none.
    """
    memory = torch.empty(file.size_bytes, dtype=torch.uint8)
    raw = msgspec.json.decode(file.header, type=dict[str, msgspec.Raw])
    entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
    tensors = {name: _view(memory, name, msgspec.json.decode(e, type=_Entry)) for name, e in entries.items()}
    file.fill(memory.numpy().data)
    return tensors


def _view(memory: torch.Tensor, name: str, entry: _Entry) -> torch.Tensor:
    if entry.dtype not in _DTYPES:
        raise ValueError(f"tensor {name} is of dtype {entry.dtype}")
    kind, (start, end) = _DTYPES[entry.dtype], entry.data_offsets
    count = math.prod(entry.shape) * kind.itemsize
    if end - start != count or end > len(memory) or start % kind.itemsize:
        raise ValueError(
            f"tensor {name} of shape {entry.shape} is said to lie at bytes {start} to {end} of {len(memory)}"
        )
    return memory[start:end].view(kind).view(entry.shape)
