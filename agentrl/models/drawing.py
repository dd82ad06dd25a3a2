"""Models with every parameter drawn at random, for checks: a bias that is zero shows nowhere when it is dropped."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

_VECTOR_NOISE = 0.5


def write_drawn_model(config: PreTrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write a model of a configuration into a folder, float32 and drawn at random; returns it.

    The generator of the process stays where it was.
    """
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        draw_parameters(network)
    network.save_pretrained(folder)
    return network


@torch.no_grad()
def draw_parameters(network: PreTrainedModel) -> None:
    """Give every parameter and saved buffer random values that keep activations near one.

    Matrices are normal by their last dimension; norms, biases, sinks and the like move by about a half.
    """
    for tensor in network.state_dict().values():
        if not tensor.is_floating_point():
            continue
        if tensor.ndim > 1:
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
        else:
            tensor.add_(_VECTOR_NOISE * torch.randn_like(tensor))
