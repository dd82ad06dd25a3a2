"""Attention over slots: an attention function of transformers that reads and writes our KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from agentrl.engine.slots import KVCache

SLOT_ATTENTION = "agentrl_slots"


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Where the tokens of one forward pass stand: row b is slot ``rows[b]`` at ``positions[b]``.

    `rows` is a slice when the rows are consecutive slots, which saves copying their KV. Positions
    behind a row's last token are padding: what they write is overwritten before it is read.
    """

    cache: KVCache
    rows: slice | torch.Tensor  # [B]
    row_ids: torch.Tensor  # [B]
    positions: torch.Tensor  # [B, T]
    visible: torch.Tensor  # [B, 1, T, L] bool: cached columns that each token may attend to


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    slot_batch: SlotBatch,
    scaling: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values [B, heads, T, D] in their slots, attend to all cached ones."""
    cache, length = slot_batch.cache, slot_batch.visible.shape[-1]
    keys, values = cache.keys[module.layer_idx], cache.values[module.layer_idx]
    keys[slot_batch.row_ids[:, None], :, slot_batch.positions] = key.transpose(1, 2)
    values[slot_batch.row_ids[:, None], :, slot_batch.positions] = value.transpose(1, 2)
    cached_keys = keys[slot_batch.rows, :, :length]
    cached_values = values[slot_batch.rows, :, :length]
    shape = query.shape
    groups = shape[1] // key.shape[1]
    if groups > 1 and shape[2] == 1:
        query = query.reshape(shape[0], key.shape[1], groups, shape[3])
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        cached_keys,
        cached_values,
        attn_mask=slot_batch.visible,
        scale=scaling,
        enable_gqa=groups > 1 and shape[2] > 1,
    )
    return output.reshape(shape).transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, attend)
