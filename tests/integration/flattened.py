"""SGLang's flattened bucket, pickled without having SGLang."""

from __future__ import annotations

import base64
import pickle
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

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
    """The payload of ``load_format: flattened_bucket`` as SGLang writes it: ``numel`` counts bytes."""
    return _flattened(tensors, counts_bytes=True)


def flatten_by_values(tensors: list[tuple[str, torch.Tensor]]) -> str:
    """The same as the embedded engine reads it: ``numel`` counts values."""
    return _flattened(tensors, counts_bytes=False)


def _flattened(tensors: list[tuple[str, torch.Tensor]], counts_bytes: bool) -> str:
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]
    metadata, start = [], 0
    for (name, tensor), piece in zip(tensors, pieces, strict=True):
        end, numel = start + len(piece), len(piece) if counts_bytes else tensor.numel()
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, numel))
        start = end
    return bucket(torch.cat(pieces), metadata)


def bucket(flat: Any, metadata: list[Any]) -> str:
    """A payload of these parts, whether they fit together or not."""
    modules = {name: ModuleType(name) for name in (*_PARENTS, _MODULE)}
    modules[_MODULE].FlattenedTensorMetadata = FlattenedTensorMetadata
    with patch.dict(sys.modules, modules):
        return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": metadata})).decode()
