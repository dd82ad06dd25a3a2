"""Attention over packed rows: an attention function of transformers that keeps sequences apart.

Everything but attention runs on the packed row without padding. For attention alone the sequences are
laid out side by side, padded to the longest, which micro-batches of like lengths keep cheap; the fused
causal kernel needs no mask then, on CPUs and GPUs alike. Layers with a window give that kernel some rows at a
time with the keys that these see, so that neither time nor mask grows with the square of the length. Layers
with a soft cap or sinks compute scores themselves, some rows at a time, and again for the gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from agentrl.models.attention import (
    AttentionFeatures,
    attend_eagerly,
    attend_in_rows,
    read_features,
    rows_at_once,
)
from agentrl.trainer.packing import PackedLayout

PACKED_ATTENTION = "agentrl_packed"
_WINDOWED_ROWS = 512


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layout: PackedLayout,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sequence to itself; tensors are [1, heads, T, D].

    Raises:
        ConfigError: the model asks for more than windows, soft caps and sinks.
    """
    features = read_features(module, attention_mask, keywords)
    num_sequences, longest = layout.gather_NL.shape
    indices = layout.gather_NL.reshape(-1)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        rows = packed[0].transpose(0, 1).index_select(0, indices)
        return rows.view(num_sequences, longest, *rows.shape[1:]).transpose(1, 2)

    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = causal_attention(unpack(query), unpack(key), unpack(value), scaling, features)
    rows = output.transpose(1, 2).flatten(0, 1)
    return rows.index_select(0, layout.scatter_T)[None], None


def causal_attention(
    query_NHLD: torch.Tensor,
    key_NKLD: torch.Tensor,
    value_NKLE: torch.Tensor,
    scaling: float,
    features: AttentionFeatures,
) -> torch.Tensor:
    """Attention of N sequences of L tokens to themselves; [N, H, L, E], differentiable, with its memory bounded."""
    num_sequences, num_heads, longest, _ = query_NHLD.shape
    window = min(features.window or longest, longest)
    if window == longest and not features.changes_scores:
        return torch.nn.functional.scaled_dot_product_attention(
            query_NHLD,
            key_NKLD,
            value_NKLE,
            is_causal=True,
            scale=scaling,
            enable_gqa=num_heads != key_NKLD.shape[1],
        )
    part = partial(_attend_rows, query_NHLD, key_NKLD, value_NKLE, scaling, features, window)
    if not features.changes_scores:
        return attend_in_rows(part, longest, _WINDOWED_ROWS)
    rows_per_part = rows_at_once(longest, num_sequences * num_heads * longest)
    return attend_in_rows(lambda rows: checkpoint(part, rows, use_reentrant=False), longest, rows_per_part)


def _attend_rows(
    query_NHLD: torch.Tensor,
    key_NKLD: torch.Tensor,
    value_NKLE: torch.Tensor,
    scaling: float,
    features: AttentionFeatures,
    window: int,
    rows: slice,
) -> torch.Tensor:
    """Attention of some query rows to the keys that they see."""
    columns = slice(max(0, rows.start - window + 1), rows.stop)
    row_T1 = torch.arange(rows.start, rows.stop, device=query_NHLD.device)[:, None]
    column_L = torch.arange(columns.start, columns.stop, device=query_NHLD.device)
    visible_TL = (column_L <= row_T1) & (column_L > row_T1 - window)
    query, key, value = query_NHLD[:, :, rows], key_NKLD[:, :, columns], value_NKLE[:, :, columns]
    if features.changes_scores:
        return attend_eagerly(query, key, value, visible_TL[None], scaling, features)
    # With a mask and grouped heads at once, the fused kernels of GPUs fall back to one that holds all scores.
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible_TL, scale=scaling)


AttentionInterface.register(PACKED_ATTENTION, attend)
