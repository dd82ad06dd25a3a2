"""A small random model of a folder's architecture, and what plain transformers says of two texts under it.

A model of up to `SMALL_PARAMETERS` keeps its configuration. Of a larger one there is one layer of each kind, with few
heads as wide as they are, few experts, and a short vocabulary. In both, windows are cut short so that the texts are
longer than any. The weights of the folder are not used: a bias that is zero in them would
hide that it is dropped, and what is found holds for every folder of the same configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from agentrl.models.drawing import write_drawn_model
from agentrl.models.support import decoder_layers, fixed_rotary_positions
from agentrl.types.errors import ConfigError

SMALL_PARAMETERS = 20_000_000
TEXT_TOKENS = (40, 23)
_WINDOW_TOKENS = 8
_VOCABULARY_TOKENS = 512
_WIDTH = 256
_KEY_HEADS = 2
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
_OWN_NUMBER = ("layer_idx", "layer_id", "layer_number", "training")


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A model folder, texts of unequal length, and logprobs_TV of the next token behind each of their tokens."""

    folder: Path
    texts: tuple[np.ndarray, ...]
    logprobs_TV: tuple[torch.Tensor, ...]


def make_probe(config: PreTrainedConfig, folder: Path) -> Probe:
    """Write a random model of an architecture, and ask the unmodified model of transformers about two texts.

    It runs in float64 with transformers' own eager attention, one text after the other.
    """
    small = probe_config(config)
    write_drawn_model(small, folder)
    plain = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    ).eval()
    limits = (small.to_dict().get("max_position_embeddings"), fixed_rotary_positions(small))
    longest = min(limit or max(TEXT_TOKENS) for limit in limits)
    rng = np.random.default_rng(0)
    texts = tuple(rng.integers(0, small.vocab_size, min(size, longest)) for size in TEXT_TOKENS)
    with torch.no_grad():
        logprobs = tuple(plain(torch.from_numpy(text)[None]).logits[0].log_softmax(-1) for text in texts)
    return Probe(folder, texts, logprobs)


def probe_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration to check in the place of another: the same kinds of layers, as small as can be."""
    values = _with_short_windows(config.to_dict())
    whole = type(config).from_dict(values)
    if sum(parameter.numel() for parameter in _on_paper(whole).parameters()) <= SMALL_PARAMETERS:
        return whole
    cuts = [cut for narrow in (_narrowed(values), values) for cut in _cut(type(config), narrow)]
    most = max((num_kinds for num_kinds, _ in cuts), default=0)
    return next((cut for num_kinds, cut in cuts if num_kinds == most), whole)


def _with_short_windows(values: dict[str, Any]) -> dict[str, Any]:
    is_window = {
        name: name.endswith(("window", "window_size")) and type(value) is int for name, value in values.items()
    }
    return {n: min(value, _WINDOW_TOKENS) if is_window[n] and value > 0 else value for n, value in values.items()}


def _narrowed(values: dict[str, Any]) -> dict[str, Any]:
    """Fewer heads and experts, less vocabulary, and at most one dense layer before those of experts."""
    limits = dict.fromkeys(_WIDTHS, _WIDTH) | dict.fromkeys(_EXPERTS, _num_experts(values))
    limits |= {"vocab_size": _VOCABULARY_TOKENS, "first_k_dense_replace": 1} | _fewer_heads(values)
    narrow = {n: min(v, limits[n]) if n in limits and type(v) is int else v for n, v in values.items()}
    return {n: None if n.endswith("_token_id") else value for n, value in narrow.items()}


def _fewer_heads(values: Mapping[str, Any]) -> dict[str, int]:
    """Two key heads with as many query heads for each, and hidden states that are as wide for each of these."""
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if not heads or not hidden:
        return {}
    key_heads = values.get("num_key_value_heads") or heads
    fewer = min(key_heads, _KEY_HEADS) * (heads // key_heads)
    return {
        "num_key_value_heads": _KEY_HEADS,
        "num_attention_heads": fewer,
        "hidden_size": fewer * (hidden // heads),
    }


def _num_experts(values: Mapping[str, Any]) -> int:
    """Twice as many as a token uses, in as many groups as there are, two at least in each."""
    used = values.get("num_experts_per_tok") or 1
    groups = values.get("n_group") or 1
    per_group = -(-2 * used // (values.get("topk_group") or groups))
    return groups * max(2, per_group)


def _cut(kind: type[PreTrainedConfig], values: dict[str, Any]) -> Iterator[tuple[int, PreTrainedConfig]]:
    """Configurations of few layers that have every kind of layer, the fewest first, and how many kinds there are."""
    try:
        kinds = [_kind_of(layer) for layer in decoder_layers(_on_paper(kind.from_dict(values)))]
    except (ConfigError, ValueError, RuntimeError, AttributeError, TypeError):
        return  # numbers that do not go together
    firsts = [kinds.index(known) for known in dict.fromkeys(kinds)]
    for chosen in (firsts, list(range(max(firsts) + 1))):
        cut = {name: _chosen(name, value, chosen, len(kinds)) for name, value in values.items()}
        candidate = kind.from_dict(cut | {"num_hidden_layers": len(chosen)})
        if {_kind_of(layer) for layer in decoder_layers(_on_paper(candidate))} == set(kinds):
            yield len(set(kinds)), candidate


def _chosen(name: str, value: Any, layers: list[int], num_layers: int) -> Any:
    """Entries of a list that has one for each layer; any other value as it is."""
    is_by_layer = isinstance(value, list) and len(value) == num_layers and not name.endswith("token_id")
    return [value[layer] for layer in layers] if is_by_layer else value


def _on_paper(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without weights."""
    with torch.device("meta"):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return network


def _kind_of(layer: torch.nn.Module) -> tuple[Any, ...]:
    """What tells a layer from others: its modules, their plain settings and their weights."""
    described = []
    for name, module in layer.named_modules():
        plain = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str) or v is None}
        settings = sorted((n, repr(v)) for n, v in plain.items() if n not in _OWN_NUMBER)
        shapes = [(n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)]
        described.append((name, type(module).__name__, tuple(settings), tuple(shapes)))
    return tuple(described)
