"""Which experts a mixture chose for each token: read from the forward pass, kept beside the KV."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.engine.slots import lazy_zeros

# What transformers' expert modules call their second argument: the ids [tokens, top_k] to be applied.
_CHOICE = ("top_k_index", "router_indices")


class RoutingRecorder:
    """The experts of every cached position of every slot; layers without experts hold 0.

    The choice is read where it is applied, at the input of the expert modules, since models differ in which
    module makes it and in what that returns.

    Example: after ``store`` of a pass that put three tokens at the start of slot 0, ``read(0, 3)`` gives their
    experts, [3, layers, top_k].
    """

    def __init__(self, network: PreTrainedModel, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_layers = network.config.get_text_config().num_hidden_layers
        self._chosen: dict[int, torch.Tensor] = {}
        self._experts_SPLK: torch.Tensor | None = None
        for layer, module, argument in _expert_modules(network):
            module.register_forward_pre_hook(self._listener(layer, argument), with_kwargs=True)

    def store(self, row_ids: torch.Tensor, positions: torch.Tensor, capacity: int) -> None:
        """Keep what the last forward pass chose for tokens of slots [B] at positions [B, T].

        Args:
            row_ids: the slots.
            positions: where their tokens stand.
            capacity: columns of the KV cache, to which this one grows.
        """
        top_k = next(iter(self._chosen.values())).shape[-1]
        experts_SPLK = self._reserve(capacity, top_k)
        for layer, chosen in self._chosen.items():
            experts_SPLK[row_ids[:, None], positions, layer] = chosen.reshape(*positions.shape, top_k)
        self._chosen.clear()

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first positions of one slot to another, as their KV is."""
        if self._experts_SPLK is not None:
            self._experts_SPLK[target, :num_tokens] = self._experts_SPLK[source, :num_tokens]

    def read(self, slot: int, num_tokens: int) -> np.ndarray:
        """Experts of a slot's first positions; [num_tokens, layers, top_k] int32."""
        if self._experts_SPLK is None:
            return np.zeros((0, self._num_layers, 0), "<i4")
        return self._experts_SPLK[slot, :num_tokens].cpu().numpy().astype("<i4")

    def _reserve(self, capacity: int, top_k: int) -> torch.Tensor:
        kept = self._experts_SPLK
        if kept is not None and kept.shape[1] >= capacity:
            return kept
        shape = (self._num_slots, capacity, self._num_layers, top_k)
        device = next(iter(self._chosen.values())).device
        grown = lazy_zeros(shape, torch.int16, str(device))
        if kept is not None:
            grown[:, : kept.shape[1]] = kept
        self._experts_SPLK = grown
        return grown

    def _listener(self, layer: int, argument: str) -> Any:
        def listen(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            chosen = args[1] if len(args) > 1 else kwargs[argument]
            self._chosen[layer] = chosen.to(torch.int16)

        return listen


def has_experts(network: PreTrainedModel) -> bool:
    """Whether a model routes tokens to experts in a way that can be read."""
    return bool(_expert_modules(network))


def _expert_modules(network: PreTrainedModel) -> list[tuple[int, torch.nn.Module, str]]:
    """Layer, module and name of the choosing argument of each expert module."""
    found = []
    for name, module in network.base_model.named_modules():
        arguments = list(inspect.signature(type(module).forward).parameters)
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if layer and len(arguments) > 2 and arguments[2] in _CHOICE:
            found.append((int(layer[1]), module, arguments[2]))
    return found
