"""What agentrl needs of a model, found out from its configuration and its layers; what lacks it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from agentrl.types.errors import ConfigError

_LAYER_KINDS = {"full_attention", "sliding_attention"}
# Kinds of rotary embedding whose frequencies depend on the longest sequence of a forward pass.
_ROTARY_BY_LENGTH = ("dynamic", "longrope")


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a model folder. Raises ConfigError if it is none."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no model at {folder}: config.json is missing; give a folder made by save_pretrained")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {folder} cannot be loaded: {error}") from error
    return config


def refusal(config: PreTrainedConfig) -> str | None:
    """Why models of a configuration cannot be trained or served; None if nothing in it speaks against them."""
    if config.is_encoder_decoder:
        return "it has an encoder and a decoder, and agentrl runs decoders alone"
    if config.get_text_config() is not config:
        return "it has parts beside its text model (images, sound), and agentrl runs text models alone"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model of this type"
    values = config.to_dict()
    if kinds := sorted(set(values.get("layer_types") or ()) - _LAYER_KINDS):
        return f"it has layers of kind {', '.join(kinds)}, and agentrl runs {' and '.join(sorted(_LAYER_KINDS))}"
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method", "an unknown method")
        return f"its weights are quantized ({method}); save it in bfloat16 or float32 and give that folder"
    if _is_stateful(type(config)):
        return "it has recurrent layers (linear attention, Mamba), whose state agentrl does not keep for each sequence"
    return None


def _is_stateful(kind: type[PreTrainedConfig]) -> bool:
    # The annotation says a pair, which only the mapping of tokenizers has.
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    return bool(model._is_stateful)


def decoder_layers(network: PreTrainedModel) -> torch.nn.ModuleList:
    """The repeated layers of a model. Raises ConfigError if they are not where decoders of today have them."""
    layers = dict(network.base_model.named_children()).get("layers")
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigError(
            f"{type(network.base_model).__name__} ({network.config.model_type}) has no `layers`, where agentrl looks "
            "for the repeated layers of a decoder"
        )
    return layers


def fixed_rotary_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence, in tokens, up to which rotary frequencies do not depend on it; None if they never do.

    Beyond it the frequencies of every token in a forward pass follow from the longest sequence in it, which has
    another neighbour in the trainer than in the engine.

    Example: Phi-3.5-mini (longrope, 131,072 positions) was trained on 4096 and has fixed frequencies up to there.
    """
    values = config.to_dict()
    parameters = values.get("rope_parameters") or {}
    bases = [base for base in parameters.values() if isinstance(base, Mapping)] or [parameters]
    limits = [_fixed_positions(base, values) for base in bases if base.get("rope_type") in _ROTARY_BY_LENGTH]
    return min(limits, default=None)


def _fixed_positions(base: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """Dynamic frequencies are fixed up to the configured length, those of longrope up to the original one."""
    if base["rope_type"] == "longrope":
        return int(base.get("original_max_position_embeddings") or values["original_max_position_embeddings"])
    return int(values["max_position_embeddings"])
