"""LoRA adapters beside a served model: each row of a forward pass goes through its own, or through none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from agentrl.engine.peft import LoraPair, LoraPairs
from agentrl.engine.request import BadRequestError

NO_ADAPTER = 0


@dataclass(frozen=True, slots=True)
class _Stack:
    """Matrices of one module, by place: A [N + 1, R, in] and B [N + 1, out, R], padded with zeros.

    `rows` are views of both at each place.
    """

    a_NRI: torch.Tensor
    b_NOR: torch.Tensor
    rows: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def empty(cls, linear: torch.nn.Linear, num_places: int, rank: int) -> _Stack:
        a_NRI = linear.weight.new_zeros(num_places, rank, linear.in_features)
        b_NOR = linear.weight.new_zeros(num_places, linear.out_features, rank)
        return cls(a_NRI, b_NOR, tuple(zip(a_NRI.unbind(), b_NOR.unbind(), strict=True)))

    @property
    def rank(self) -> int:
        return self.a_NRI.shape[1]

    def grown(self, linear: torch.nn.Linear, num_places: int, rank: int) -> _Stack:
        """A larger one with the same contents."""
        larger = _Stack.empty(linear, num_places, rank)
        larger.a_NRI[: len(self.a_NRI), : self.rank] = self.a_NRI
        larger.b_NOR[: len(self.b_NOR), :, : self.rank] = self.b_NOR
        return larger


@dataclass(slots=True)
class _Writes:
    """Matrices to be written, all in one call of the tensor library.

    Each call of its gives the interpreter away and has to wait for it again: hundreds of small ones beside a thread
    that draws tokens slow both down.
    """

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    zeroed: list[torch.Tensor] = field(default_factory=list)

    def add(self, stack: _Stack, place: int, pair: LoraPair | None) -> None:
        a_RI, b_OR = stack.rows[place]
        rank = 0 if pair is None else pair.a_RI.shape[0]
        if rank < stack.rank:
            self.zeroed += (a_RI, b_OR)
            a_RI, b_OR = a_RI[:rank], b_OR[:, :rank]
        if pair is not None:
            self.targets += (a_RI, b_OR)
            self.sources += (pair.a_RI, pair.b_OR)

    def carry_out(self) -> None:
        if self.zeroed:
            torch._foreach_zero_(self.zeroed)
        torch._foreach_copy_(self.targets, self.sources)


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """An adapter whose matrices have been written to a free place, not yet served."""

    serial: int
    place: int
    stacks: dict[str, _Stack]
    free: list[int]


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
        self._free: list[int] = []
        self._stacks: dict[str, _Stack] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._num_rows = 0
        self._selected: int | torch.Tensor | None = None

    def place(self, serial: int, pairs: LoraPairs) -> PlacedAdapter:
        """Write an adapter beside those that are served; one call at a time.

        Raises:
            BadRequestError: it changes what is no linear module of the model, or does not fit it; nothing changes.
        """
        self._check(pairs)
        free = list(self._free)
        num_places = 1 + len(self._places) + len(free)
        if not free:
            free = list(range(num_places, 2 * num_places))
            num_places = 2 * num_places
        place = free.pop(0)
        rank = max([pair.a_RI.shape[0] for pair in pairs.values()] + [stack.rank for stack in self._stacks.values()])
        stacks, writes = {}, _Writes()
        for name in self._stacks.keys() | pairs.keys():
            linear, stack = self._linears[name], self._stacks.get(name)
            if stack is None:
                stack = _Stack.empty(linear, num_places, rank)
            elif stack.rank < rank or len(stack.a_NRI) < num_places:
                stack = stack.grown(linear, num_places, rank)
            writes.add(stack, place, pairs.get(name))
            stacks[name] = stack
        writes.carry_out()
        return PlacedAdapter(serial, place, stacks, free)

    def put(self, placed: PlacedAdapter) -> None:
        """Serve an adapter from the next step on."""
        self._places[placed.serial] = placed.place
        self._stacks, self._free = placed.stacks, placed.free
        self._selected = None
        for name in self._stacks.keys() - self._hooks.keys():
            self._hooks[name] = self._linears[name].register_forward_hook(self._adder(name))

    def remove(self, serial: int) -> None:
        """Forget an adapter that no request uses."""
        self._free.append(self._places.pop(serial))
        self._selected = None
        if not self._places:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks, self._stacks, self._free = {}, {}, []

    def select(self, serials: np.ndarray) -> None:
        """Choose the adapter of each row [B] of the next pass; serials that are gone count as none."""
        self._selected = None
        if not self._places:
            return
        places = np.asarray([self._places.get(int(serial), 0) for serial in serials])
        if not places.any():
            return
        self._num_rows = len(places)
        is_uniform = (places == places[0]).all()
        self._selected = int(places[0]) if is_uniform else torch.from_numpy(places).to(self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._linears.values())).weight.device

    def _check(self, pairs: LoraPairs) -> None:
        for name, pair in pairs.items():
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
            stack = self._stacks[name]
            input_BTI = args[0].reshape(self._num_rows, -1, args[0].shape[-1])
            change_BTO = input_BTI @ stack.a_NRI[self._selected].mT @ stack.b_NOR[self._selected].mT
            return output + change_BTO.reshape(output.shape)

        return add
