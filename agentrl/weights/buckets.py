"""Cuts the weights of a folder into buckets of bounded size, by reading no more than the files' headers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from agentrl.types.errors import StorageError
from agentrl.types.weights import Bucket

_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1}
_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32",
    "U8": "uint8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    item_bytes: int


def plan_buckets(folder: Path, bucket_bytes: int) -> list[Bucket]:
    """The folder's tensors in buckets of at most `bucket_bytes`; a larger tensor gets one of its own.

    Raises:
        StorageError: the weights cannot be read.
    """
    buckets: list[list[_Entry]] = [[]]
    size = 0
    for entry in _entries(folder):
        if buckets[-1] and size + entry.num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(entry)
        size += entry.num_bytes
    return [_bucket(entries) for entries in buckets if entries]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder that hold its weights. Raises StorageError."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError) as error:
        raise StorageError(f"weights index {index} cannot be read: {error}") from error
    return [folder / "model.safetensors"]


def _entries(folder: Path) -> list[_Entry]:
    entries: list[_Entry] = []
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                entries += [_entry(name, tensors.get_slice(name)) for name in tensors.keys()]  # noqa: SIM118
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise StorageError(f"weights {file} cannot be read: {error}") from error
    return entries


def _entry(name: str, piece: Any) -> _Entry:
    kind, shape = piece.get_dtype(), tuple(piece.get_shape())
    return _Entry(name, _DTYPES[kind], shape, math.prod(shape) * _ITEM_BYTES[kind], _ITEM_BYTES[kind])


def _bucket(entries: list[_Entry]) -> Bucket:
    # Flattened, a tensor can be viewed in place only if it starts at a multiple of its values' size.
    entries = sorted(entries, key=lambda entry: -entry.item_bytes)
    return Bucket(
        tuple(e.name for e in entries),
        tuple(e.dtype for e in entries),
        tuple(e.shape for e in entries),
        sum(e.num_bytes for e in entries),
    )
