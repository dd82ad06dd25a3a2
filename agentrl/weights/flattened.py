"""Several tensors as one run of bytes, in SGLang's layout: one after the other, without gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FlattenedTensorMetadata:
    """Where a tensor lies in a bucket; class and field names are the protocol's.

    `start_idx` and `end_idx` count bytes, `numel` counts values.

    Example: the second of two float32 tensors of shapes (2, 3) and (4,) is
    ``FlattenedTensorMetadata("b", torch.Size([4]), torch.float32, 24, 40, 4)``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def plan_layout(
    names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> list[FlattenedTensorMetadata]:
    """Places of tensors that follow each other."""
    layout: list[FlattenedTensorMetadata] = []
    start = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        numel = math.prod(shape)
        end = start + numel * dtype.itemsize
        layout.append(FlattenedTensorMetadata(name, torch.Size(shape), dtype, start, end, numel))
        start = end
    return layout


def unflatten(flat: torch.Tensor, layout: Sequence[FlattenedTensorMetadata]) -> dict[str, torch.Tensor]:
    """The tensors by name; views of `flat` where alignment allows it.

    Raises:
        ValueError: a name twice, places that overlap or lie outside, or sizes that contradict each other.
    """
    if flat.dtype is not torch.uint8 or flat.dim() != 1:
        raise ValueError(f"flattened_tensor must be one row of uint8, not {tuple(flat.shape)} of {flat.dtype}")
    end = 0
    for place in sorted(layout, key=lambda place: place.start_idx):
        _check_place(place, len(flat))
        if place.start_idx < end:
            raise ValueError(f"bytes of {place.name} overlap those of the tensor before it")
        end = place.end_idx
    tensors = {place.name: _cut(flat, place) for place in layout}
    if len(tensors) != len(layout):
        raise ValueError("a name occurs twice in one bucket")
    return tensors


def _check_place(place: FlattenedTensorMetadata, num_bytes: int) -> None:
    start, end = place.start_idx, place.end_idx
    if not 0 <= start <= end <= num_bytes:
        raise ValueError(f"bytes {start} to {end} of {place.name} lie outside of a bucket of {num_bytes}")
    needed = math.prod(place.shape) * place.dtype.itemsize
    if end - start != needed or place.numel != math.prod(place.shape) or min(place.shape, default=0) < 0:
        raise ValueError(f"{place.name} has {end - start} bytes where its shape {tuple(place.shape)} needs {needed}")


def _cut(flat: torch.Tensor, place: FlattenedTensorMetadata) -> torch.Tensor:
    piece = flat[place.start_idx : place.end_idx]
    if piece.storage_offset() % place.dtype.itemsize:
        piece = piece.clone()
    return piece.view(place.dtype).reshape(place.shape)
