"""LoRA adapters beside a served model: each row of a forward pass goes through its own, or through none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from agentrl.engine.peft import LoraPair, LoraPairs
from agentrl.engine.request import BadRequestError

NO_ADAPTER = 0


class LoraStack:
    """The matrices of all loaded adapters, stacked module by module; place 0 of a stack is zero.

    An adapter is known by its serial, a number that is never used again, so that KV made under it can be told
    from that of a later adapter of the same name. Only modules that some adapter changes have a hook, and
    none has one while no adapter is loaded.

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
        self._adapters: dict[int, LoraPairs] = {}
        self._places: dict[int, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._num_rows = 0
        self._selected: int | torch.Tensor | None = None

    def put(self, serial: int, pairs: LoraPairs) -> None:
        """Take an adapter.

        Raises:
            BadRequestError: it changes what is no linear module of the model, or does not fit it; nothing changes.
        """
        for name, pair in pairs.items():
            if name not in self._linears:
                raise BadRequestError(f"the model has no linear module {name} inside its layers")
            expected = (self._linears[name].out_features, self._linears[name].in_features)
            shape = (pair.b_OR.shape[0], pair.a_RI.shape[1])
            if shape != expected:
                raise BadRequestError(f"the adapter's change of {name} has shape {shape}, the module's is {expected}")
        self._adapters[serial] = pairs
        self._rebuild()

    def remove(self, serial: int) -> None:
        """Forget an adapter that no request uses."""
        del self._adapters[serial]
        self._rebuild()

    def select(self, serials: np.ndarray) -> None:
        """Choose the adapter of each row [B] of the next pass; serials that are gone count as none."""
        self._selected = None
        if not self._adapters:
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

    def _rebuild(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._places = {serial: place for place, serial in enumerate(self._adapters, start=1)}
        self._selected = None
        changed = {name for pairs in self._adapters.values() for name in pairs}
        self._hooks = [self._linears[name].register_forward_hook(self._adder(name)) for name in sorted(changed)]

    def _adder(self, name: str) -> Any:
        """A hook that adds what each row's adapter makes of the module's input."""
        a_NRI, b_NOR = _stack([pairs.get(name) for pairs in self._adapters.values()], self._linears[name])

        def add(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if self._selected is None:
                return output
            input_BTI = args[0].reshape(self._num_rows, -1, args[0].shape[-1])
            change_BTO = input_BTI @ a_NRI[self._selected].mT @ b_NOR[self._selected].mT
            return output + change_BTO.reshape(output.shape)

        return add


def _stack(pairs: list[LoraPair | None], linear: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices A [N + 1, R, in] and B [N + 1, out, R] of N adapters, padded with zeros to the largest rank."""
    rank = max(pair.a_RI.shape[0] for pair in pairs if pair is not None)
    a_NRI = linear.weight.new_zeros(len(pairs) + 1, rank, linear.in_features)
    b_NOR = linear.weight.new_zeros(len(pairs) + 1, linear.out_features, rank)
    for place, pair in enumerate(pairs, start=1):
        if pair is not None:
            a_NRI[place, : pair.a_RI.shape[0]] = pair.a_RI
            b_NOR[place, :, : pair.b_OR.shape[1]] = pair.b_OR
    return a_NRI, b_NOR
