"""LoRA adapters beside a served model: each row of a forward pass goes through its own, or through none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from agentrl.engine.peft import LoraAdapter
from agentrl.engine.request import BadRequestError

NO_ADAPTER = 0
# None, the newest, the one before that generations still use, and one that is loading: what a run has at a time.
_FIRST_PLACES = 4


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Matrices of one module, by place: A [N, R, in] and B [N, out, R]."""

    a_NRI: torch.Tensor
    b_NOR: torch.Tensor


class AdapterPool:
    """Memory for adapters of some modules, up to a rank; smaller ones are padded with zeros, and place 0 is zero."""

    def __init__(
        self, linears: Mapping[str, torch.nn.Linear], modules: Collection[str], rank: int, num_places: int
    ) -> None:
        self.rank, self.num_places = rank, num_places
        self.matrices: dict[str, _Matrices] = {}
        for name in modules:
            weight_OI = linears[name].weight
            num_out, num_in = weight_OI.shape
            a_NRI = weight_OI.new_zeros(num_places, rank, num_in)
            self.matrices[name] = _Matrices(a_NRI, weight_OI.new_zeros(num_places, num_out, rank))

    def take_in(self, other: AdapterPool) -> None:
        """Copy all places of a pool that is not larger in any respect."""
        for name, old in other.matrices.items():
            new = self.matrices[name]
            new.a_NRI[: other.num_places, : other.rank] = old.a_NRI
            new.b_NOR[: other.num_places, :, : other.rank] = old.b_NOR

    def write(self, place: int, adapter: LoraAdapter) -> None:
        """Copy an adapter to a place, whatever that held."""
        for name, matrices in self.matrices.items():
            a_RI, b_OR = matrices.a_NRI[place], matrices.b_NOR[place]
            pair = adapter.pairs.get(name)
            rank = 0 if pair is None else len(pair.a_RI)
            a_RI[rank:], b_OR[:, rank:] = 0, 0
            if pair is not None:
                a_RI[:rank], b_OR[:, :rank] = pair.a_RI, pair.b_OR


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """An adapter whose matrices have been written to a free place, not yet served."""

    serial: int
    place: int
    pool: AdapterPool
    free: tuple[int, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class _Uniform:
    """All rows of a pass go through the adapter in one place."""

    place: int
    scale: float

    def added(self, input_BTI: torch.Tensor, matrices: _Matrices, output_BTO: torch.Tensor) -> torch.Tensor:
        """The output with the adapter's change; rows and tokens may be one dimension."""
        hidden_NR = input_BTI.flatten(0, -2) @ matrices.a_NRI[self.place].mT
        output_NO = output_BTO.flatten(0, -2)
        return torch.addmm(output_NO, hidden_NR, matrices.b_NOR[self.place].mT, alpha=self.scale).view_as(output_BTO)


@dataclass(frozen=True, slots=True)
class _Mixed:
    """Each row of a pass goes through the adapter in its own place [B], with its own scale [B, 1, 1]."""

    places: torch.Tensor
    scales_B11: torch.Tensor

    def added(self, input_BTI: torch.Tensor, matrices: _Matrices, output_BTO: torch.Tensor) -> torch.Tensor:
        """The output with each row's change; rows and tokens may be one dimension."""
        num_rows = len(self.places)
        rows_BTI = input_BTI.reshape(num_rows, -1, input_BTI.shape[-1])
        rows_BTO = output_BTO.reshape(num_rows, -1, output_BTO.shape[-1])
        hidden_BTR = rows_BTI @ matrices.a_NRI[self.places].mT * self.scales_B11
        return torch.baddbmm(rows_BTO, hidden_BTR, matrices.b_NOR[self.places].mT).view_as(output_BTO)


class LoraStack:
    """The matrices of all loaded adapters, stacked module by module; place 0 of a stack is zero.

    An adapter is known by its serial, a number that is never used again, so that KV made under it can be told
    from that of a later adapter of the same name. `place` writes into a place that no request reads, so it may
    run in a thread while tokens are drawn; `put` only exchanges pointers. Only modules that some adapter has
    changed have a hook, and none has one while no adapter is loaded.

    Example: with serial 3 in place 1, ``select(np.array([3, 0]))`` sends row 0 of the next pass through the
    adapter and row 1 through the bare weights.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        inside = f"{network.base_model_prefix}."
        self._linears = {
            name: module
            for name, module in network.named_modules()
            if isinstance(module, torch.nn.Linear) and name.startswith(inside)
        }
        self._places: dict[int, int] = {}
        self._scales: dict[int, float] = {}
        self._free: tuple[int, ...] = ()
        self._pool: AdapterPool | None = None
        self._matrices: Mapping[str, _Matrices] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._selected: _Uniform | _Mixed | None = None

    def place(self, serial: int, adapter: LoraAdapter) -> PlacedAdapter:
        """Write an adapter beside those that are served; one call at a time.

        Raises:
            BadRequestError: it changes what is no linear module of the model, or does not fit it; nothing changes.
        """
        self._check(adapter)
        pool, free = self._pool_for(adapter)
        pool.write(free[0], adapter)
        return PlacedAdapter(serial, free[0], pool, free[1:], adapter.scale)

    def put(self, placed: PlacedAdapter) -> None:
        """Serve an adapter from the next step on."""
        self._places[placed.serial] = placed.place
        self._scales[placed.serial] = placed.scale
        self._free = placed.free
        self._selected = None
        if placed.pool is self._pool:
            return
        self._pool, self._matrices = placed.pool, placed.pool.matrices
        for name in self._matrices.keys() - self._hooks.keys():
            self._hooks[name] = self._linears[name].register_forward_hook(self._adder(name))

    def remove(self, serial: int) -> None:
        """Forget an adapter that no request uses."""
        self._free += (self._places.pop(serial),)
        del self._scales[serial]
        self._selected = None
        if not self._places:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks, self._matrices, self._pool, self._free = {}, {}, None, ()

    def select(self, serials: np.ndarray) -> None:
        """Choose the adapter of each row [B] of the next pass; unknown serials count as none."""
        self._selected = None
        if not self._places:
            return
        places = np.asarray([self._places.get(int(serial), 0) for serial in serials])
        if not places.any():
            return
        scales = [self._scales.get(int(serial), 0.0) for serial in serials]
        if (places == places[0]).all():
            self._selected = _Uniform(int(places[0]), scales[0])
        else:
            scales_B11 = torch.tensor(scales, dtype=self._dtype)[:, None, None]
            self._selected = _Mixed(torch.from_numpy(places).to(self._device), scales_B11.to(self._device))

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._linears.values())).weight.dtype

    @property
    def _device(self) -> torch.device:
        return next(iter(self._linears.values())).weight.device

    def _pool_for(self, adapter: LoraAdapter) -> tuple[AdapterPool, tuple[int, ...]]:
        """A pool that the adapter fits in, the one there is or a larger copy, and its free places."""
        pool = self._pool
        if pool is None:
            places = tuple(range(1, _FIRST_PLACES))
            return AdapterPool(self._linears, adapter.pairs, adapter.rank, _FIRST_PLACES), places
        free, num_places = self._free, pool.num_places
        if free and adapter.rank <= pool.rank and adapter.pairs.keys() <= pool.matrices.keys():
            return pool, free
        if not free:
            free, num_places = tuple(range(num_places, 2 * num_places)), 2 * num_places
        modules = pool.matrices.keys() | adapter.pairs.keys()
        larger = AdapterPool(self._linears, modules, max(pool.rank, adapter.rank), num_places)
        larger.take_in(pool)
        return larger, free

    def _check(self, adapter: LoraAdapter) -> None:
        for name, pair in adapter.pairs.items():
            if name not in self._linears:
                raise BadRequestError(f"the model has no linear module {name} inside its layers")
            expected = (self._linears[name].out_features, self._linears[name].in_features)
            shape = (pair.b_OR.shape[0], pair.a_RI.shape[1])
            if shape != expected:
                raise BadRequestError(f"the adapter's change of {name} has shape {shape}, the module's is {expected}")

    def _adder(self, name: str) -> Any:
        """A hook that adds what each row's adapter makes of the module's input."""

        def add(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if self._selected is None:
                return output
            return self._selected.added(args[0], self._matrices[name], output)

        return add
