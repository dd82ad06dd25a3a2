"""Memory of the adapters that an engine serves beside its weights."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agentrl.engine.peft import LoraAdapter
from agentrl.engine.zeros import lazy_zeros, shared_zeros


@dataclass(frozen=True, slots=True)
class LoraLayout:
    """How an adapter's matrices lie one behind the other: of each module in turn A [R, in], then B [out, R].

    This is how PEFT's files hold them, whose tensors are sorted by name.
    """

    modules: tuple[str, ...]
    rank: int
    dtype: torch.dtype

    @classmethod
    def of(cls, adapter: LoraAdapter) -> LoraLayout | None:
        """The layout of an adapter whose matrices lie like this in one piece of memory; None if they do not."""
        matrices = [matrix for pair in adapter.pairs.values() for matrix in (pair.a_RI, pair.b_OR)]
        first, end = matrices[0], matrices[0].data_ptr()
        rank = first.shape[0]
        for matrix in matrices:
            if matrix.dtype != first.dtype or matrix.data_ptr() != end or not matrix.is_contiguous():
                return None
            end += matrix.nbytes
        return cls(tuple(adapter.pairs), rank, first.dtype)

    def covering(self, other: LoraLayout) -> LoraLayout:
        """A layout like this, larger where the other is: its rank, and its modules behind these."""
        more = [name for name in other.modules if name not in self.modules]
        return LoraLayout((*self.modules, *more), max(self.rank, other.rank), self.dtype)


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """Matrices of one module, by place: A [N, R, in] and B [N, out, R]; `rows` are views of both at each place."""

    a_NRI: torch.Tensor
    b_NOR: torch.Tensor
    rows: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class LoraRoom:
    """Places for adapters of one layout; a smaller one is padded with zeros, and place 0 is zero.

    Memory [N, E] holds a place of `place_bytes` in each row, so that a file of this layout is read into a row as it is.
    Where another process can do that, `descriptor` is that of a file which maps this memory, open as long as the room
    is there.

    Example: two modules of 6 and 8 values at rank 1 make rows of A1 B1 A2 B2, and ``matrices[second].a_NRI`` begins
    in column 6 of each.
    """

    def __init__(self, linears: Mapping[str, torch.nn.Linear], layout: LoraLayout, num_places: int) -> None:
        self.layout = layout
        sizes = [
            layout.rank * size for n in layout.modules for size in (linears[n].in_features, linears[n].out_features)
        ]
        self.place_bytes = sum(sizes) * layout.dtype.itemsize
        device, shape = str(linears[layout.modules[0]].weight.device), (num_places, sum(sizes))
        self.descriptor: int | None = None
        if device == "cpu" and sys.platform == "linux":
            self.memory_NE, self.descriptor = shared_zeros(shape, layout.dtype)
            weakref.finalize(self, os.close, self.descriptor)
        else:
            self.memory_NE = lazy_zeros(shape, layout.dtype, device)
        self.matrices: dict[str, LoraMatrices] = {}
        pieces = iter(self.memory_NE.split(sizes, dim=1))
        for name in layout.modules:
            a_NRI = next(pieces).unflatten(1, (layout.rank, linears[name].in_features))
            b_NOR = next(pieces).unflatten(1, (linears[name].out_features, layout.rank))
            self.matrices[name] = LoraMatrices(a_NRI, b_NOR, tuple(zip(a_NRI.unbind(), b_NOR.unbind(), strict=True)))

    @property
    def num_places(self) -> int:
        """Rows, that of zeros included."""
        return len(self.memory_NE)

    def take_in(self, other: LoraRoom) -> None:
        """Copy all places of a room that is not larger in any respect."""
        for name, old in other.matrices.items():
            new = self.matrices[name]
            new.a_NRI[: other.num_places, : other.layout.rank] = old.a_NRI
            new.b_NOR[: other.num_places, :, : other.layout.rank] = old.b_NOR

    def write(self, place: int, adapter: LoraAdapter) -> None:
        """Copy an adapter to a place, whatever that held.

        All in few calls of the tensor library: each gives the interpreter away and has to wait for it again, so
        hundreds of small ones beside a thread that draws tokens slow both down.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        zeroed: list[torch.Tensor] = []
        for name, matrices in self.matrices.items():
            a_RI, b_OR = matrices.rows[place]
            pair = adapter.pairs.get(name)
            rank = 0 if pair is None else pair.a_RI.shape[0]
            if rank < self.layout.rank:
                zeroed += (a_RI, b_OR)
            if pair is not None:
                targets += (a_RI[:rank], b_OR[:, :rank])
                sources += (pair.a_RI, pair.b_OR)
        if zeroed:
            torch._foreach_zero_(zeroed)
        torch._foreach_copy_(targets, sources)
