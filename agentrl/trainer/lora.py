"""Low-rank adapters on a policy's linear layers: the base is frozen, only the adapters train.

LoRA, Hu et al. 2021, arXiv 2106.09685, equation 3: a layer computes x W^T + (alpha / rank) x A^T B^T with A
[rank, in] random and B [out, rank] zero at first, so that training begins at the base model exactly.
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

from agentrl.models.support import decoder_layers
from agentrl.trainer.config import LoraConfig
from agentrl.types.errors import ConfigError

_FIRST_WEIGHTS_SEED = 0


class LoraLinear(torch.nn.Linear):
    """A linear layer that keeps its weight and its name, with an adapter beside it."""

    def __init__(self, base: torch.nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.scale = config.alpha / config.rank
        bound = 1 / math.sqrt(base.in_features)
        first = torch.empty(config.rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = torch.nn.Parameter(first.to(base.weight.device))
        self.lora_B = torch.nn.Parameter(base.weight.new_zeros(base.out_features, config.rank))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer with its adapter."""
        linear = torch.nn.functional.linear
        return linear(input, self.weight, self.bias) + self.scale * linear(linear(input, self.lora_A), self.lora_B)


def add_adapters(network: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze a model and give its named linear layers an adapter each; alike on every rank.

    Raises:
        ConfigError: a name is not that of a linear layer in the model's blocks.
    """
    network.requires_grad_(False)
    generator = torch.Generator().manual_seed(_FIRST_WEIGHTS_SEED)
    layers = decoder_layers(network)
    linears = {name: module for name, module in layers.named_modules() if isinstance(module, torch.nn.Linear)}
    found = {name.rpartition(".")[2] for name in linears}
    if unknown := sorted(set(config.target_modules) - found):
        raise ConfigError(
            f"trainer.lora.target_modules: the blocks have no linear layer {', '.join(unknown)}; "
            f"there are {', '.join(sorted(found))}"
        )
    for name, module in linears.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in config.target_modules:
            setattr(layers.get_submodule(parent), leaf, LoraLinear(module, config, generator))


def adapters_of(network: PreTrainedModel) -> dict[str, LoraLinear]:
    """Layers with an adapter by their names; empty for a model that is trained whole."""
    return {name: module for name, module in network.named_modules() if isinstance(module, LoraLinear)}
