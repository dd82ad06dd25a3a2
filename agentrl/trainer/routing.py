"""Routing replay: the forward pass uses the experts that the engine used, and still trains the router.

After Rollout Routing Replay (R3), "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", arXiv 2510.11370: the training forward pass takes the engine's choice of experts and weighs them by
the softmax of its own router's logits over that choice, so that gradients reach the router. Where we differ:
weights are normalised as the model itself does it (a model without `norm_topk_prob` is not renormalised); a
position without a record keeps the live choice; and after an abort a position keeps the experts under which
the token behind it was drawn, although the engine computed it again under newer weights.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl.models.support import decoder_layers
from agentrl.trainer.packing import PackedLayout
from agentrl.types.errors import TrainerError

# Routers that take the softmax over all experts, then the top k of it, normalised if `norm_topk_prob` says so.
_ROUTERS = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter")


class RouterReplay:
    """Hooks of one layer: they see the layer's recorded experts go by and enforce them in its router.

    The record is taken from the arguments of the layer's attention, which stands before the router. So a layer
    that is computed again for its gradient finds the record of the micro-batch that it belongs to.
    """

    def __init__(self, layer: int, is_normalised: bool) -> None:
        self._layer, self._is_normalised = layer, is_normalised
        self._experts_TK: torch.Tensor | None = None

    def attach(self, attention: torch.nn.Module, router: torch.nn.Module) -> None:
        """Take part in every forward pass from now on."""
        attention.register_forward_pre_hook(self._see, with_kwargs=True)
        router.register_forward_hook(self._enforce)

    def _see(self, _attention: torch.nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        experts = kwargs["layout"].experts_TK
        self._experts_TK = None if experts is None else experts[self._layer]

    def _enforce(
        self, _router: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """The router's logits, with weights and ids of the recorded experts in place of the chosen."""
        if self._experts_TK is None:
            return output
        logits_TE, weights_TK, live_TK = output
        if self._experts_TK.shape != live_TK.shape:
            shapes = f"{tuple(self._experts_TK.shape)}, the model chooses {tuple(live_TK.shape)}"
            raise ValueError(f"recorded experts of layer {self._layer} have shape {shapes}")
        ids_TK = torch.where(self._experts_TK >= 0, self._experts_TK, live_TK)
        chosen_TK = torch.softmax(logits_TE, -1, dtype=torch.float).gather(1, ids_TK)
        if self._is_normalised:
            chosen_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
        return logits_TE, chosen_TK.to(weights_TK.dtype), ids_TK


def install_replay(network: PreTrainedModel) -> int:
    """Make the routers of a model follow records where a forward pass carries them; returns their number.

    A model without experts, or with routers of another kind, is left as it is.
    """
    count = 0
    for number, layer in enumerate(decoder_layers(network)):
        routers = [module for module in layer.modules() if type(module).__name__ in _ROUTERS]
        if routers:
            (router,) = routers
            RouterReplay(number, bool(router.norm_topk_prob)).attach(layer.get_submodule("self_attn"), router)
            count += 1
    return count


def check_replayable(network: PreTrainedModel, num_replays: int, layout: PackedLayout) -> None:
    """Refuse a record that the model's routers cannot follow, instead of training on other experts.

    Raises:
        TrainerError: the model has no router that is known here, or fewer layers or experts than the record.
    """
    if layout.experts_TK is None:
        return
    if num_replays == 0:
        raise TrainerError(
            f"the batch records routed experts, but {type(network).__name__} has no router among "
            f"{', '.join(_ROUTERS)}; set rollout.sampling.routed_experts=false"
        )
    num_layers = len(decoder_layers(network))
    if len(layout.experts_TK) != num_layers:
        raise TrainerError(f"experts are recorded for {len(layout.experts_TK)} layers; the model has {num_layers}")
    num_experts = network.config.num_experts
    largest = int(torch.stack([experts_TK.max() for experts_TK in layout.experts_TK]).max())
    if largest >= num_experts:
        raise TrainerError(f"expert {largest} is recorded; the model has {num_experts} in each layer")
