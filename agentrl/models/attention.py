"""What a model asks of an attention function, and attention with score limits or sinks, which no fused kernel has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.types.errors import ConfigError

# Dropout never acts: both sides run their models in evaluation mode. The rest says what to return beside the output.
_HARMLESS = {
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
}
_SCORES_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True, eq=False)
class AttentionFeatures:
    """What one layer adds to plain causal attention.

    `window` is the number of last tokens that a token attends to, itself included. Scores become
    ``softcap * tanh(scores / softcap)``. `sinks_H` are scores, one for each query head, that take part in the softmax
    without a value (GPT-OSS, "attention sinks").

    Example: a sliding layer of Gemma 2 has ``AttentionFeatures(window=4096, softcap=50.0)``.
    """

    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether a fused kernel cannot compute it."""
        return self.softcap is not None or self.sinks_H is not None


def read_features(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, keywords: Mapping[str, Any]
) -> AttentionFeatures:
    """What a model's attention module asks for, by the keywords that it calls an attention function with.

    Raises:
        ConfigError: it asks for something that is not known here; the message names model and feature.
    """
    asked = {name: value for name, value in keywords.items() if not (name in _HARMLESS or _is_off(value))}
    window, softcap, sinks_H = (asked.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    if attention_mask is not None:
        asked["attention_mask"] = attention_mask
    if keywords.get("is_causal", True) is False or not getattr(module, "is_causal", True):
        asked["is_causal=False"] = True
    asked.pop("is_causal", None)
    if asked:
        raise ConfigError(
            f"the attention of {_type_of(module)} models asks for {', '.join(sorted(asked))}, which agentrl does not "
            "know and will not leave out"
        )
    return AttentionFeatures(window, softcap, sinks_H)


def rows_at_once(num_rows: int, scores_per_row: int) -> int:
    """Query rows whose scores may be in memory together: 2**24 scores, 64 MB in float32, and at least one row."""
    return max(1, min(num_rows, _SCORES_AT_ONCE // max(scores_per_row, 1)))


def attend_eagerly(
    query_BHTD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLE: torch.Tensor,
    visible_BTL: torch.Tensor,
    scaling: float,
    features: AttentionFeatures,
) -> torch.Tensor:
    """Attention with all scores in memory; [B, H, T, E].

    Scores and softmax are float32 at least. Query heads of a group share a key head; every row must see a key.

    Args:
        query_BHTD: queries.
        key_BKLD: keys of K heads, which divide H.
        value_BKLE: values.
        visible_BTL: bool, [B or 1, T, L].
        scaling: of the scores.
        features: soft cap and sinks are applied; the window is up to `visible_BTL`.
    """
    num_heads, num_rows = query_BHTD.shape[1:3]
    groups = num_heads // key_BKLD.shape[1]
    folded = query_BHTD.unflatten(1, (-1, groups)).flatten(2, 3)
    scores = (folded @ key_BKLD.mT).unflatten(2, (groups, num_rows)).flatten(1, 2) * scaling
    scores_BHTL = scores if scores.dtype is torch.float64 else scores.float()
    if features.softcap is not None:
        scores_BHTL = features.softcap * torch.tanh(scores_BHTL / features.softcap)
    scores_BHTL = scores_BHTL.masked_fill(~visible_BTL[:, None], float("-inf"))
    probs_BHTL = _softmax(scores_BHTL, features.sinks_H).to(value_BKLE.dtype)
    folded_output = probs_BHTL.unflatten(1, (-1, groups)).flatten(2, 3) @ value_BKLE
    output_BHTE: torch.Tensor = folded_output.unflatten(2, (groups, num_rows)).flatten(1, 2)
    return output_BHTE


def attend_in_rows(attend: Callable[[slice], torch.Tensor], num_rows: int, rows_per_part: int) -> torch.Tensor:
    """Attention [B, H, T, E] of `num_rows` query rows, computed by `attend` for a few rows after the other."""
    starts = range(0, num_rows, rows_per_part)
    parts = [attend(slice(start, min(start + rows_per_part, num_rows))) for start in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _softmax(scores_BHTL: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    if sinks_H is None:
        return scores_BHTL.softmax(-1)
    sinks_BHT1 = sinks_H.to(scores_BHTL.dtype)[None, :, None, None].expand(*scores_BHTL.shape[:3], 1)
    return torch.cat([scores_BHTL, sinks_BHT1], dim=-1).softmax(-1)[..., :-1]


def _is_off(value: object) -> bool:
    return value is None or value is False


def _type_of(module: torch.nn.Module) -> str:
    """The model type of an attention module, or its class name if it does not know its configuration."""
    config = getattr(module, "config", None)
    return type(module).__name__ if config is None else config.model_type
