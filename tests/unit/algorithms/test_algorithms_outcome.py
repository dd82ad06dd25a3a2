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
    TisConfig,
)
from agentrl.algorithms.outcome import TokenOutcome, token_outcome, token_statuses
from agentrl.types.explanation import TokenStatus

KEPT, LOW, HIGH, REJECTED = TokenStatus.KEPT, TokenStatus.CLIPPED_LOW, TokenStatus.CLIPPED_HIGH, TokenStatus.REJECTED
BEHAVIOUR = PpoConfig(clip_low=0.2, clip_high=0.28, proximal="behaviour")


def outcome(loss: LossConfig, tokens: list[tuple[float, float, float]], correction=None) -> TokenOutcome:
    """Of tokens given as probability now, probability when sampled, advantage."""
    now, before, advantages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    config = AlgorithmConfig(loss=loss, correction=correction or NoCorrectionConfig())
    numbers = torch.arange(len(tokens))
    return token_outcome(now.log(), before.log(), advantages, numbers, torch.zeros_like(numbers), config)


def statuses(found: TokenOutcome, *mismatched: int) -> list[TokenStatus]:
    return token_statuses(found, torch.tensor([n in mismatched for n in range(len(found.gap_S))]))


def test_ppo_clips_above_for_good_tokens_and_below_for_bad_ones():
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.25, 0.85: the last two lie within [0.8, 1.28].
    tokens = [(0.3, 0.2, 1.0), (0.3, 0.2, -1.0), (0.1, 0.2, 1.0), (0.1, 0.2, -1.0), (0.25, 0.2, 1.0), (0.17, 0.2, -1.0)]
    assert statuses(outcome(BEHAVIOUR, tokens)) == [HIGH, KEPT, KEPT, LOW, KEPT, KEPT]


def test_ppo_against_the_recomputed_policy_clips_nothing():
    assert statuses(outcome(PpoConfig(), [(0.9, 0.1, 1.0), (0.1, 0.9, -1.0)])) == [KEPT, KEPT]


def test_a_token_outside_the_bounds_of_icepop_is_rejected():
    # Ratios 6, 0.4, 2 with bounds [0.5, 5].
    found = outcome(PpoConfig(), [(0.6, 0.1, 1.0), (0.2, 0.5, 1.0), (0.4, 0.2, -1.0)], IcePopConfig())
    assert statuses(found) == [REJECTED, REJECTED, KEPT]
    assert found.weights_S.tolist() == pytest.approx([0, 0, 2], rel=1e-5)
    assert found.gap_S.tolist() == pytest.approx([math.log(6), math.log(0.4), math.log(2)], rel=1e-5)


def test_a_token_that_is_clipped_as_well_as_rejected_is_rejected():
    # Ratios 6 and 3: both clipped at 1.28, the first beyond 5 too. Of a corrected loss weights are 0 or 1.
    found = outcome(BEHAVIOUR, [(0.6, 0.1, 1.0), (0.6, 0.2, 1.0)], IcePopConfig())
    assert found.losses.clipped_S.tolist() == [True, True]
    assert statuses(found) == [REJECTED, HIGH]
    assert found.weights_S.tolist() == [0, 1]


def test_cispo_bounds_its_weight_on_either_side_whatever_the_advantage():
    # Ratios 6, 6, 0.25, 2 with bounds [0.5, 5].
    tokens = [(0.6, 0.1, 1.0), (0.6, 0.1, -1.0), (0.1, 0.4, 1.0), (0.4, 0.2, 1.0)]
    assert statuses(outcome(CispoConfig(clip_low=0.5), tokens)) == [HIGH, HIGH, LOW, KEPT]


def test_dppo_cuts_what_moved_far_where_the_advantage_points():
    # Moves of +0.3, +0.3, -0.3, -0.3, +0.1 in probability.
    tokens = [(0.8, 0.5, 1.0), (0.8, 0.5, -1.0), (0.2, 0.5, 1.0), (0.2, 0.5, -1.0), (0.6, 0.5, 1.0)]
    assert statuses(outcome(DppoConfig(threshold=0.2), tokens)) == [HIGH, KEPT, KEPT, LOW, KEPT]


def test_a_mismatched_token_is_nothing_else():
    found = outcome(BEHAVIOUR, [(0.6, 0.1, 1.0), (0.6, 0.2, 1.0), (0.2, 0.2, 1.0)], IcePopConfig())
    assert statuses(found, 0, 2) == [TokenStatus.MISMATCHED, HIGH, TokenStatus.MISMATCHED]


def from_start(loss: LossConfig, correction, *tokens: tuple[float, float, float, float]) -> TokenOutcome:
    """Of tokens given as probability now, at the start of the step, when sampled, and advantage."""
    now, start, before, advantages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    config = AlgorithmConfig(loss=loss, correction=correction)
    numbers = torch.arange(len(tokens))
    zeros = torch.zeros_like(numbers)
    return token_outcome(now.log(), before.log(), advantages, numbers, zeros, config, start.log())


def test_decoupled_ppo_clips_against_the_start_and_weighs_the_start_against_the_sampling_policy():
    """verl's decoupled form: clip(pi / pi_prox) times min(pi_prox / mu, cap); by hand."""
    # pi / pi_prox 1.5, 1.5, 0.5, 1.1; pi_prox / mu 2, 0.5, 5 (capped to 2), 0.4.
    tokens = (0.6, 0.4, 0.2, 1.0), (0.3, 0.2, 0.4, -1.0), (0.25, 0.5, 0.1, -2.0), (0.22, 0.2, 0.5, 2.0)
    found = from_start(PpoConfig(), TisConfig(), *tokens)
    assert found.weights_S.tolist() == pytest.approx([2.0, 0.5, 2.0, 0.4], rel=1e-5)
    assert found.losses.loss_S.tolist() == pytest.approx([-1.28, 1.5, 1.6, -2.2], rel=1e-5)
    assert statuses(found) == [HIGH, KEPT, LOW, KEPT]
    assert found.moved_S.exp().tolist() == pytest.approx([1.5, 1.5, 0.5, 1.1], rel=1e-5)
    assert found.gap_S.exp().tolist() == pytest.approx([3.0, 0.75, 2.5, 0.44], rel=1e-5)


def test_tokens_are_rejected_by_the_start_of_the_step_and_not_by_what_it_did_since():
    # pi_prox / mu 1, 6 against [0.5, 5]; pi / mu 6, 1.
    found = from_start(PpoConfig(), IcePopConfig(), (0.6, 0.1, 0.1, 1.0), (0.1, 0.6, 0.1, 1.0))
    assert statuses(found) == [HIGH, REJECTED]


@pytest.mark.parametrize("loss", [CispoConfig(), DppoConfig(), BEHAVIOUR])
def test_losses_against_the_sampling_policy_do_not_look_at_the_start(loss):
    token = (0.6, 0.2, -1.0)
    alone = outcome(loss, [token], TisConfig())
    later = from_start(loss, TisConfig(), (0.6, 0.3, 0.2, -1.0))
    assert later.losses.loss_S.tolist() == alone.losses.loss_S.tolist()
    assert later.weights_S.tolist() == alone.weights_S.tolist() == [1.0]
