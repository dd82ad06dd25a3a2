"""LoRA adapters beside a served model: each row of a forward pass goes through its own, or through none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from agentrl.engine.peft import LoraAdapter, LoraPair
from agentrl.engine.request import BadRequestError

NO_ADAPTER = 0


class ServedAdapters:
    """The adapters that a model serves beside its bare weights.

    An adapter is known by its serial, a number that is never used again, so that KV made under it can be told
    from that of a later adapter of the same name. `fitted` touches nothing that is served, so it may run in a thread
    while tokens are drawn. Modules that no adapter changes have no hook, and none has one while no adapter is loaded.

    Example: ``select(np.array([3, 0]))`` sends row 0 of the next pass through the adapter of serial 3 and row 1
    through the bare weights.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        inside = f"{network.base_model_prefix}."
        self._linears = {
            name: module
            for name, module in network.named_modules()
            if isinstance(module, torch.nn.Linear) and name.startswith(inside)
        }
        self._device = network.device
        self._adapters: dict[int, LoraAdapter] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._num_rows = 0
        self._selected: list[tuple[LoraAdapter, torch.Tensor]] = []

    def fitted(self, adapter: LoraAdapter) -> LoraAdapter:
        """A copy in the dtype and on the device of the modules that it changes.

        Raises:
            BadRequestError: it changes what is no linear module of the model, or does not fit it.
        """
        return replace(adapter, pairs={name: self._fitted(name, pair) for name, pair in adapter.pairs.items()})

    def put(self, serial: int, fitted: LoraAdapter) -> None:
        """Serve an adapter from the next step on."""
        self._adapters[serial] = fitted
        for name in fitted.pairs.keys() - self._hooks.keys():
            self._hooks[name] = self._linears[name].register_forward_hook(self._adder(name))

    def remove(self, serial: int) -> None:
        """Forget an adapter that no request uses."""
        del self._adapters[serial]
        self._selected = []
        changed = {name for adapter in self._adapters.values() for name in adapter.pairs}
        for name in self._hooks.keys() - changed:
            self._hooks.pop(name).remove()

    def select(self, serials: np.ndarray) -> None:
        """Choose the adapter of each row [B] of the next pass; unknown serials count as none."""
        if (serials == serials[0]).all():
            # One row of all tokens, also to modules that see only some of them.
            serials = serials[:1]
        self._num_rows, self._selected = len(serials), []
        for serial in set(serials.tolist()) & self._adapters.keys():
            rows = torch.from_numpy(np.flatnonzero(serials == serial))
            self._selected.append((self._adapters[serial], rows.to(self._device)))

    def _fitted(self, name: str, pair: LoraPair) -> LoraPair:
        if name not in self._linears:
            raise BadRequestError(f"the model has no linear module {name} inside its layers")
        linear = self._linears[name]
        expected = (linear.out_features, linear.in_features)
        shape = (pair.b_OR.shape[0], pair.a_RI.shape[1])
        if shape != expected:
            raise BadRequestError(f"the adapter's change of {name} has shape {shape}, the module's is {expected}")
        # Copied, since the sender may write to memory that it shares once it has its answer.
        a_RI, b_OR = (side.to(linear.weight.device, linear.weight.dtype, copy=True) for side in (pair.a_RI, pair.b_OR))
        return LoraPair(a_RI, b_OR)

    def _adder(self, name: str) -> Any:
        """A hook that adds what each row's adapter makes of its input; rows and tokens may be one dimension."""

        def add(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for adapter, rows in self._selected:
                pair = adapter.pairs.get(name)
                if pair is not None:
                    input_BTI = args[0].reshape(self._num_rows, -1, args[0].shape[-1])[rows]
                    change_BTO = input_BTI @ pair.a_RI.mT @ pair.b_OR.mT
                    output_BTO = output.view(self._num_rows, -1, output.shape[-1])
                    output_BTO.index_add_(0, rows, change_BTO, alpha=adapter.scale)

        return add
