from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.config import CorrectionConfig, IcePopConfig, NoCorrectionConfig, TisConfig
from agentrl.algorithms.correction import correction_weights

# Two sequences; the first has turns 0 and 1, the second turn 0.
DISTANCES = [math.log(1.5), math.log(0.5), math.log(3), math.log(1.2), math.log(0.1), math.log(2)]
TURNS = [0, 0, 1, 0, 0, 0]
SEQUENCES = [0, 0, 0, 1, 1, 1]


def weights(config: CorrectionConfig, distances=DISTANCES, turns=TURNS, sequences=SEQUENCES) -> list[float]:
    columns = torch.tensor(distances, requires_grad=True), torch.tensor(turns), torch.tensor(sequences)
    weights_S = correction_weights(*columns, config)
    assert not weights_S.requires_grad
    assert weights_S.dtype is torch.float32
    return weights_S.tolist()


def test_without_correction_every_token_counts_fully():
    assert weights(NoCorrectionConfig()) == [1.0] * 6


def test_token_weights_by_hand():
    assert weights(TisConfig()) == pytest.approx([1.5, 0.5, 2, 1.2, 0.1, 2], rel=1e-5)


def test_turn_weights_by_hand():
    # 1.5 * 0.5 and 3 (capped) for the turns of the first; 1.2 * 0.1 * 2 for the only turn of the second.
    assert weights(TisConfig(level="turn")) == pytest.approx([0.75, 0.75, 2, 0.24, 0.24, 0.24], rel=1e-5)


def test_sequence_weights_by_hand():
    assert weights(TisConfig(level="sequence")) == pytest.approx([2, 2, 2, 0.24, 0.24, 0.24], rel=1e-5)
    assert weights(TisConfig(level="sequence", cap=10))[:3] == pytest.approx([2.25] * 3, rel=1e-5)


def test_icepop_by_hand():
    assert weights(IcePopConfig(low=0.5, high=2.5)) == pytest.approx([1.5, 0.5, 0, 1.2, 0, 2], rel=1e-5)


def naive(config: CorrectionConfig, distances, turns, sequences) -> list[float]:
    out = []
    for i, distance in enumerate(distances):
        total = distance
        if isinstance(config, TisConfig) and config.level != "token":
            total = 0.0
            for j, other in enumerate(distances):
                is_turn = config.level == "sequence" or turns[j] == turns[i]
                total += other if sequences[j] == sequences[i] and is_turn else 0.0
        ratio = math.exp(max(-20.0, min(20.0, total)))
        if isinstance(config, TisConfig):
            out.append(min(ratio, config.cap))
        else:
            out.append(ratio if config.low <= ratio <= config.high else 0.0)
    return out


TOKENS = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=10)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@given(TOKENS)
def test_truncated_weights_equal_a_naive_loop_in_any_order_of_tokens(level, tokens):
    columns = [list(column) for column in zip(*tokens, strict=True)]
    config = TisConfig(level=level)
    assert weights(config, *columns) == pytest.approx(naive(config, *columns), rel=1e-3, abs=1e-6)


@given(st.lists(st.sampled_from([-3.0, -0.5, -0.1, 0.0, 0.3, 1.0, 1.5, 1.7, 4.0]), min_size=1, max_size=8))
def test_icepop_equals_a_naive_loop(distances):
    zeros = [0] * len(distances)
    config = IcePopConfig()
    assert weights(config, distances, zeros, zeros) == pytest.approx(naive(config, distances, zeros, zeros), rel=1e-4)


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_no_tokens_have_no_weights(level):
    assert weights(TisConfig(level=level), [], [], []) == []


@pytest.mark.parametrize("config", [TisConfig(), TisConfig(level="turn"), TisConfig(level="sequence"), IcePopConfig()])
def test_on_policy_tokens_count_fully(config):
    assert weights(config, [0.0] * 6) == [1.0] * 6
