"""Attention over packed rows: an attention function of transformers that keeps sequences apart.

Everything but attention runs on the packed row without padding. For attention alone the sequences are
laid out side by side, padded to the longest, which micro-batches of like lengths keep cheap; the fused
causal kernel needs no mask then, on CPUs and GPUs alike.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from agentrl.trainer.packing import PackedLayout

PACKED_ATTENTION = "agentrl_packed"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layout: PackedLayout,
    scaling: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sequence to itself; tensors are [1, heads, T, D]."""
    num_sequences, longest = layout.gather_NL.shape
    indices = layout.gather_NL.reshape(-1)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        rows = packed[0].transpose(0, 1).index_select(0, indices)
        return rows.view(num_sequences, longest, *rows.shape[1:]).transpose(1, 2)

    output = torch.nn.functional.scaled_dot_product_attention(
        unpack(query),
        unpack(key),
        unpack(value),
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    rows = output.transpose(1, 2).flatten(0, 1)
    return rows.index_select(0, layout.scatter_T)[None], None


AttentionInterface.register(PACKED_ATTENTION, attend)
