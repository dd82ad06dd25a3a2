"""Attention functions against loops over single rows, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.models import attention as subject
from agentrl.models.attention import AttentionFeatures, read_features
from agentrl.trainer.attention import causal_attention
from agentrl.types.errors import ConfigError


def naive(query, key, value, scaling, features: AttentionFeatures) -> torch.Tensor:
    """One query at a time, one key at a time."""
    num_sequences, num_heads, length, _ = query.shape
    groups = num_heads // key.shape[1]
    output = torch.zeros(num_sequences, num_heads, length, value.shape[-1], dtype=query.dtype)
    for n in range(num_sequences):
        for head in range(num_heads):
            for row in range(length):
                first = 0 if features.window is None else max(0, row - features.window + 1)
                scores = [
                    float(query[n, head, row] @ key[n, head // groups, c]) * scaling for c in range(first, row + 1)
                ]
                if features.softcap is not None:
                    scores = [features.softcap * math.tanh(score / features.softcap) for score in scores]
                total = sum(math.exp(score) for score in scores)
                if features.sinks_H is not None:
                    total += math.exp(float(features.sinks_H[head]))
                for column, score in enumerate(scores, first):
                    output[n, head, row] += math.exp(score) / total * value[n, head // groups, column]
    return output


@settings(max_examples=60)
@given(
    length=st.integers(1, 12),
    window=st.none() | st.integers(1, 14),
    softcap=st.none() | st.sampled_from([0.5, 3.0]),
    has_sinks=st.booleans(),
    groups=st.sampled_from([1, 2]),
    rows=st.integers(1, 13),
    seed=st.integers(0, 3),
)
def test_attention_equals_a_naive_loop(length, window, softcap, has_sinks, groups, rows, seed):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = drawn(2, 2 * groups, length, 4), drawn(2, 2, length, 4), drawn(2, 2, length, 3)
    features = AttentionFeatures(window, softcap, drawn(2 * groups) if has_sinks else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "_SCORES_AT_ONCE", rows * 2 * query.shape[1] * length)
        patch.setattr("agentrl.trainer.attention._WINDOWED_ROWS", rows)
        mine = causal_attention(query, key, value, 0.7, features)
    torch.testing.assert_close(mine, naive(query, key, value, 0.7, features), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("features", [AttentionFeatures(window=16), AttentionFeatures(softcap=2.0)])
def test_neither_scores_nor_masks_grow_with_the_square_of_the_length(features, monkeypatch):
    length, largest = 512, 0
    monkeypatch.setattr(subject, "_SCORES_AT_ONCE", 2 * length * 16)
    monkeypatch.setattr("agentrl.trainer.attention._WINDOWED_ROWS", 32)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    query, key, value = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
    with Watch():
        causal_attention(query, key, value, 0.5, features).sum().backward()
    assert largest <= 2 * length * 16 < length * length / 4


class Attention(torch.nn.Module):
    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.config = type("Config", (), {"model_type": "newfangled"})()


def test_known_keywords_are_read_and_empty_ones_mean_nothing():
    sinks = torch.zeros(2)
    features = read_features(Attention(), None, {"sliding_window": 7, "softcap": 2.0, "s_aux": sinks, "dropout": 0.1})
    assert (features.window, features.softcap, features.sinks_H) == (7, 2.0, sinks)
    nothing = {"position_bias": None, "sliding_window": None, "output_attentions": False, "is_causal": True}
    plain = read_features(Attention(), None, nothing)
    assert (plain.window, plain.softcap, plain.sinks_H) == (None, None, None)


@pytest.mark.parametrize(
    ("module", "mask", "keywords", "named"),
    [
        (Attention(), None, {"position_bias": torch.zeros(1)}, "position_bias"),
        (Attention(), None, {"indices": torch.zeros(1), "block": 4}, "block, indices"),
        (Attention(), torch.zeros(1), {}, "attention_mask"),
        (Attention(is_causal=False), None, {}, "is_causal=False"),
        (Attention(), None, {"is_causal": False}, "is_causal=False"),
    ],
)
def test_whatever_else_a_model_asks_for_is_refused_by_name(module, mask, keywords, named):
    with pytest.raises(ConfigError, match=f"the attention of newfangled models asks for {named}, which agentrl does"):
        read_features(module, mask, keywords)
