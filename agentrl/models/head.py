"""The output head: hidden states to logits, with all that models do to them on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """What a model does to its logits: times `scale`, then softly limited to `softcap`.

    Example: Granite's ``logits_scaling = 8`` is ``LogitScaling(0.125)``, Gemma 2's
    ``final_logit_softcapping = 30`` is ``LogitScaling(softcap=30.0)``.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LogitScaling:
        """By the names that transformers' models have for it: Granite divides, Cohere multiplies, Gemma limits."""
        values = config.to_dict()
        scale = (values.get("logit_scale") or 1.0) / (values.get("logits_scaling") or 1.0)
        return cls(scale, values.get("final_logit_softcapping"))

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as the model gives them out."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """The output embedding of a model as it is at the moment: sharded weights are whole in a forward pass only."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    scaling: LogitScaling

    @classmethod
    def of(cls, network: PreTrainedModel, scaling: LogitScaling) -> OutputHead:
        """The present head of a network."""
        linear = network.get_output_embeddings()
        return cls(linear.weight, linear.bias, scaling)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H]; float32, or float64 for float64 weights."""
        logits_NV = torch.nn.functional.linear(hidden_NH, self.weight_VH, self.bias_V)
        return self.scaling.applied(logits_NV if logits_NV.dtype is torch.float64 else logits_NV.float())
