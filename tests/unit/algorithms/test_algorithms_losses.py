from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.config import CispoConfig, DppoConfig, PpoConfig, is_corrected_by_loss
from agentrl.algorithms.losses import (
    cispo,
    dppo,
    ppo_clip,
    token_loss,
    vanishes_without_advantage,
)
from agentrl.algorithms.ratios import safe_exp

PPO = PpoConfig(clip_low=0.2, clip_high=0.28)
TOKENS = st.lists(st.tuples(st.floats(-4, -0.01), st.floats(-4, -0.01), st.floats(-2, 2)), min_size=1, max_size=8)


def logs(*probabilities: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor([math.log(p) for p in probabilities], dtype=torch.float32, requires_grad=grad)


def gradient(loss_S: torch.Tensor, at: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss_S.sum(), at)[0].tolist()


def columns(tokens: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    now, before, advantages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    return now.requires_grad_(), before, advantages


def test_ppo_by_hand():
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.1: clipped where the advantage pushes further out.
    now = logs(0.3, 0.3, 0.1, 0.1, 0.22, grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    losses = ppo_clip(now, logs(0.2, 0.2, 0.2, 0.2, 0.2), advantages, PPO)
    assert losses.loss_S.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.2], rel=1e-5)
    assert losses.clipped_S.tolist() == [True, False, False, True, False]
    assert gradient(losses.loss_S, now) == pytest.approx([0, 1.5, -0.5, 0, -2.2], rel=1e-5)


def test_cispo_by_hand():
    # Ratios 8 and 1/2 against bounds [0, 5]: the weight is clipped, the gradient flows on.
    now = logs(0.8, 0.1, grad=True)
    losses = cispo(now, logs(0.1, 0.2), torch.tensor([1.0, -2.0]), CispoConfig())
    assert losses.loss_S.tolist() == pytest.approx([-5 * math.log(0.8), 0.5 * 2 * math.log(0.1)], rel=1e-5)
    assert losses.clipped_S.tolist() == [True, False]
    assert gradient(losses.loss_S, now) == pytest.approx([-5, 1], rel=1e-5)


def test_cispo_clips_its_weight_from_below_when_asked():
    losses = cispo(logs(0.1), logs(0.4), torch.tensor([1.0]), CispoConfig(clip_low=0.5))
    assert losses.loss_S.tolist() == pytest.approx([-0.5 * math.log(0.1)], rel=1e-5)
    assert losses.clipped_S.tolist() == [True]


def test_dppo_by_hand():
    # Moves of +0.3, +0.3, -0.3, -0.3 in probability: only those that the advantage asked for leave.
    now = logs(0.8, 0.8, 0.2, 0.2, grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses = dppo(now, logs(0.5, 0.5, 0.5, 0.5), advantages, DppoConfig(kl_weight=0.5))
    up, down = math.log(1.6) ** 2 / 2, math.log(0.4) ** 2 / 2
    assert losses.loss_S.tolist() == pytest.approx([up, 1.6 + up, -0.4 + down, down], rel=1e-5)
    assert losses.clipped_S.tolist() == [True, False, False, True]
    pull_up, pull_down = math.log(1.6), math.log(0.4)
    assert gradient(losses.loss_S, now) == pytest.approx(
        [pull_up, 1.6 + pull_up, -0.4 + pull_down, pull_down], rel=1e-5
    )


def test_dppo_measures_probabilities_and_not_ratios():
    # Ratio 10, but the probability moved by 0.09 only.
    losses = dppo(logs(0.1), logs(0.01), torch.tensor([1.0]), DppoConfig(kl_weight=0))
    assert losses.clipped_S.tolist() == [False]
    assert losses.loss_S.tolist() == pytest.approx([-10], rel=1e-5)


def naive(config, now: float, before: float, advantage: float) -> float:
    ratio = math.exp(max(-20.0, min(20.0, now - before)))
    if isinstance(config, PpoConfig):
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        return max(-advantage * ratio, -advantage * bounded)
    if isinstance(config, CispoConfig):
        return -min(max(ratio, max(1 - config.clip_low, 0)), 1 + config.clip_high) * advantage * now
    moved = math.exp(now) - math.exp(before)
    is_out = (advantage > 0 and moved > config.threshold) or (advantage < 0 and moved < -config.threshold)
    return (0 if is_out else -advantage * ratio) + config.kl_weight * (now - before) ** 2


@pytest.mark.parametrize("config", [PpoConfig(proximal="behaviour"), CispoConfig(), DppoConfig()])
@given(TOKENS)
def test_losses_equal_a_naive_loop(config, tokens):
    now, before, advantages = columns(tokens)
    losses = token_loss(now, before, now.detach(), advantages, config)
    assert losses.loss_S.tolist() == pytest.approx([naive(config, *token) for token in tokens], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("config", [PpoConfig(), PpoConfig(proximal="behaviour"), CispoConfig(), DppoConfig()])
@given(st.lists(st.floats(-4, -0.01), min_size=1, max_size=6), st.floats(-2, 2))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(config, logprobs, advantage):
    now = torch.tensor(logprobs, requires_grad=True)
    same = now.detach().clone()
    losses = token_loss(now, same, same, torch.full((len(logprobs),), advantage), config)
    assert not losses.clipped_S.any()
    assert gradient(losses.loss_S, now) == pytest.approx([-advantage] * len(logprobs), rel=1e-5, abs=1e-6)


@given(TOKENS)
def test_decoupled_ppo_at_its_proximal_policy_clips_nothing(tokens):
    now, before, advantages = columns(tokens)
    losses = token_loss(now, before, now.detach(), advantages, PpoConfig(proximal="recomputed"))
    assert not losses.clipped_S.any()
    assert losses.loss_S.tolist() == pytest.approx([-a for a in advantages.tolist()])
    assert gradient(losses.loss_S, now) == pytest.approx([-a for a in advantages.tolist()])


@pytest.mark.parametrize("config", [PpoConfig(), PpoConfig(proximal="behaviour"), CispoConfig(), DppoConfig()])
@given(TOKENS)
def test_a_loss_that_claims_to_vanish_without_advantage_has_no_gradient_there(config, tokens):
    now, before, advantages = columns([(n, b, 0.0) for n, b, _ in tokens])
    slopes = gradient(token_loss(now, before, now.detach(), advantages, config).loss_S, now)
    is_moved = any(abs(n - b) > 1e-3 for n, b, _ in tokens)
    if vanishes_without_advantage(config):
        assert slopes == [0.0] * len(tokens)
    else:
        assert any(slopes) or not is_moved


def test_only_a_loss_against_the_recomputed_policy_needs_a_correction():
    assert not is_corrected_by_loss(PpoConfig(proximal="recomputed"))
    assert all(map(is_corrected_by_loss, [PpoConfig(proximal="behaviour"), CispoConfig(), DppoConfig()]))


def test_ratios_neither_overflow_nor_spread_what_is_not_finite():
    values = safe_exp(torch.tensor([0.0, 1.0, 1e9, -1e9, math.nan, math.inf, -math.inf], dtype=torch.float64))
    assert values.dtype is torch.float32
    expected = [1, math.e, math.exp(20), math.exp(-20), 1, 1, 1]
    assert values.tolist() == pytest.approx(expected, rel=1e-5)
