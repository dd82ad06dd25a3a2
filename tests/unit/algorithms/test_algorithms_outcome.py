from __future__ import annotations

import math

import pytest
import torch

from agentrl.algorithms.config import (
    AlgorithmConfig,
    CispoConfig,
    DppoConfig,
    IcePopConfig,
    LossConfig,
    NoCorrectionConfig,
    PpoConfig,
)
from agentrl.algorithms.outcome import TokenOutcome, token_fates, token_outcome
from agentrl.types.explanation import Fate

KEPT, LOW, HIGH, REJECTED = Fate.KEPT, Fate.CLIPPED_LOW, Fate.CLIPPED_HIGH, Fate.REJECTED
BEHAVIOUR = PpoConfig(clip_low=0.2, clip_high=0.28, proximal="behaviour")


def outcome(loss: LossConfig, tokens: list[tuple[float, float, float]], correction=None) -> TokenOutcome:
    """Of tokens given as probability now, probability when sampled, advantage."""
    now, before, advantages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    config = AlgorithmConfig(loss=loss, correction=correction or NoCorrectionConfig())
    numbers = torch.arange(len(tokens))
    return token_outcome(now.log(), before.log(), advantages, numbers, torch.zeros_like(numbers), config)


def test_ppo_clips_above_for_good_tokens_and_below_for_bad_ones():
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.25, 0.85: the last two lie within [0.8, 1.28].
    tokens = [(0.3, 0.2, 1.0), (0.3, 0.2, -1.0), (0.1, 0.2, 1.0), (0.1, 0.2, -1.0), (0.25, 0.2, 1.0), (0.17, 0.2, -1.0)]
    assert token_fates(outcome(BEHAVIOUR, tokens)) == [HIGH, KEPT, KEPT, LOW, KEPT, KEPT]


def test_ppo_against_the_recomputed_policy_clips_nothing():
    assert token_fates(outcome(PpoConfig(), [(0.9, 0.1, 1.0), (0.1, 0.9, -1.0)])) == [KEPT, KEPT]


def test_a_token_outside_the_bounds_of_icepop_is_rejected():
    # Ratios 6, 0.4, 2 with bounds [0.5, 5].
    found = outcome(PpoConfig(), [(0.6, 0.1, 1.0), (0.2, 0.5, 1.0), (0.4, 0.2, -1.0)], IcePopConfig())
    assert token_fates(found) == [REJECTED, REJECTED, KEPT]
    assert found.weights_S.tolist() == pytest.approx([0, 0, 2], rel=1e-5)
    assert found.gap_S.tolist() == pytest.approx([math.log(6), math.log(0.4), math.log(2)], rel=1e-5)


def test_a_token_that_is_clipped_as_well_as_rejected_is_rejected():
    # Ratios 6 and 3: both clipped at 1.28, the first beyond 5 too. Of a corrected loss weights are 0 or 1.
    found = outcome(BEHAVIOUR, [(0.6, 0.1, 1.0), (0.6, 0.2, 1.0)], IcePopConfig())
    assert found.losses.clipped_S.tolist() == [True, True]
    assert token_fates(found) == [REJECTED, HIGH]
    assert found.weights_S.tolist() == [0, 1]


def test_cispo_bounds_its_weight_on_either_side_whatever_the_advantage():
    # Ratios 6, 6, 0.25, 2 with bounds [0.5, 5].
    tokens = [(0.6, 0.1, 1.0), (0.6, 0.1, -1.0), (0.1, 0.4, 1.0), (0.4, 0.2, 1.0)]
    assert token_fates(outcome(CispoConfig(clip_low=0.5), tokens)) == [HIGH, HIGH, LOW, KEPT]


def test_dppo_cuts_what_moved_far_where_the_advantage_points():
    # Moves of +0.3, +0.3, -0.3, -0.3, +0.1 in probability.
    tokens = [(0.8, 0.5, 1.0), (0.8, 0.5, -1.0), (0.2, 0.5, 1.0), (0.2, 0.5, -1.0), (0.6, 0.5, 1.0)]
    assert token_fates(outcome(DppoConfig(threshold=0.2), tokens)) == [HIGH, KEPT, KEPT, LOW, KEPT]
