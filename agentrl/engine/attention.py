"""Attention over slots: an attention function of transformers that reads and writes our KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from agentrl.engine.slots import KVCache
from agentrl.models.attention import (
    AttentionFeatures,
    attend_eagerly,
    attend_in_rows,
    read_features,
    rows_at_once,
)

SLOT_ATTENTION = "agentrl_slots"


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Where the tokens of one forward pass stand: row b is slot ``rows[b]`` at ``positions[b]``.

    `rows` is a slice when the rows are consecutive slots, which saves copying their KV. Positions
    behind a row's last token are padding: what they write is overwritten before it is read. `length` is the number
    of columns that the pass reads.
    """

    cache: KVCache
    rows: slice | torch.Tensor  # [B]
    row_ids: torch.Tensor  # [B]
    positions: torch.Tensor  # [B, T]
    length: int
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new keys and values [B, heads, T, D] into their slots; returns all up to `length`, [B, heads, L, D]."""
        keys, values = self.cache.layer(layer, key, value)
        keys[self.row_ids[:, None], :, self.positions] = key.transpose(1, 2)
        values[self.row_ids[:, None], :, self.positions] = value.transpose(1, 2)
        return keys[self.rows, :, : self.length], values[self.rows, :, : self.length]

    def visible(self, window: int | None) -> torch.Tensor:
        """[B, 1, T, L] bool: columns up to each token's own, of the last `window`; computed once for all layers."""
        if window not in self._masks:
            positions_BT1 = self.positions[:, :, None]
            columns_L = torch.arange(self.length, device=self.positions.device)
            mask_BTL = columns_L <= positions_BT1
            if window is not None:
                mask_BTL &= columns_L > positions_BT1 - window
            self._masks[window] = mask_BTL[:, None]
        return self._masks[window]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    slot_batch: SlotBatch,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values [B, heads, T, D] in their slots, attend to those that the tokens see.

    Raises:
        ConfigError: the model asks for more than windows, soft caps and sinks.
    """
    features = read_features(module, attention_mask, keywords)
    layer: Any = module.layer_idx  # an integer, which torch annotates as tensor or module
    keys, values = slot_batch.store(layer, key, value)
    visible = slot_batch.visible(features.window)
    if features.changes_scores:
        return _attend_in_rows(query, keys, values, visible, scaling, features).transpose(1, 2), None
    num_rows, num_heads, num_tokens, head_dim = query.shape
    groups = num_heads // key.shape[1]
    if groups > 1 and num_tokens == 1:
        query = query.reshape(num_rows, key.shape[1], groups, head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=visible,
        scale=scaling,
        enable_gqa=groups > 1 and num_tokens > 1,
    )
    return output.reshape(num_rows, num_heads, num_tokens, -1).transpose(1, 2), None


def _attend_in_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scaling: float | None,
    features: AttentionFeatures,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, [B, heads, T, D], some query rows after the other."""
    num_rows, num_heads, num_tokens, head_dim = query.shape
    scaling = head_dim**-0.5 if scaling is None else scaling

    def part(rows: slice) -> torch.Tensor:
        return attend_eagerly(query[:, :, rows], keys, values, visible[:, 0, rows], scaling, features)

    return attend_in_rows(part, num_tokens, rows_at_once(num_tokens, num_rows * num_heads * keys.shape[2]))


AttentionInterface.register(SLOT_ATTENTION, attend)
