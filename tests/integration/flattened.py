"""SGLang's flattened bucket, pickled without having SGLang."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

import torch
from engine_server import pickled

_MODULE = "sglang.srt.weight_sync.tensor_bucket"
_PARENTS = ("sglang", "sglang.srt", "sglang.srt.weight_sync")


@dataclass
class FlattenedTensorMetadata:
    """Where a tensor lies in the bucket, by bytes; goes by the name that the server's own class has."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


FlattenedTensorMetadata.__module__ = _MODULE


def flatten(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """The payload of ``load_format: flattened_bucket``."""
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]
    metadata, start = [], 0
    for (name, tensor), piece in zip(tensors, pieces, strict=True):
        entry = FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + len(piece), len(piece))
        metadata.append(entry)
        start += len(piece)
    modules = {name: ModuleType(name) for name in (*_PARENTS, _MODULE)}
    modules[_MODULE].FlattenedTensorMetadata = FlattenedTensorMetadata
    with patch.dict(sys.modules, modules):
        return pickled({"flattened_tensor": torch.cat(pieces), "metadata": metadata})
