"""Losses of single tokens; none looks at a mask or divides by anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algorithms.config import CispoConfig, DppoConfig, LossConfig, PpoConfig
from agentrl.algorithms.ratios import safe_exp


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token, and where its gradient was cut off or its weight clipped, by the ratio of the loss."""

    loss_S: torch.Tensor
    clipped_S: torch.Tensor
    ratio_S: torch.Tensor


def ppo_clip(
    logprobs_S: torch.Tensor, proximal_S: torch.Tensor, advantages_S: torch.Tensor, config: PpoConfig
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = pi / pi_prox (arXiv 1707.06347, eq. 7)."""
    ratio_S = safe_exp(logprobs_S - proximal_S)
    plain_S = -advantages_S * ratio_S
    clipped_S = -advantages_S * ratio_S.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(torch.maximum(plain_S, clipped_S), clipped_S > plain_S, ratio_S.detach())


def cispo(
    logprobs_S: torch.Tensor, behaviour_S: torch.Tensor, advantages_S: torch.Tensor, config: CispoConfig
) -> TokenLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi with r = pi / mu (arXiv 2506.13585, eq. 4)."""
    ratio_S = safe_exp(logprobs_S - behaviour_S).detach()
    low, high = max(1 - config.clip_low, 0.0), 1 + config.clip_high
    weight_S = ratio_S.clamp(low, high)
    return TokenLoss(-weight_S * advantages_S * logprobs_S, weight_S != ratio_S, ratio_S)


def dppo(
    logprobs_S: torch.Tensor, behaviour_S: torch.Tensor, advantages_S: torch.Tensor, config: DppoConfig
) -> TokenLoss:
    """-keep A r + w (log r)^2 with r = pi / mu (arXiv 2602.04879).

    A token is kept unless its probability (not its ratio) has moved more than the threshold in the
    direction that the advantage asks for.
    """
    log_ratio_S = logprobs_S - behaviour_S
    moved_S = (logprobs_S.exp() - behaviour_S.exp()).detach()
    is_out_S = ((advantages_S > 0) & (moved_S > config.threshold)) | (
        (advantages_S < 0) & (moved_S < -config.threshold)
    )
    kept_S = (~is_out_S).float()
    ratio_S = safe_exp(log_ratio_S)
    loss_S = -kept_S * advantages_S * ratio_S + config.kl_weight * log_ratio_S.square()
    return TokenLoss(loss_S, is_out_S, ratio_S.detach())


def token_loss(
    logprobs_S: torch.Tensor,
    behaviour_S: torch.Tensor,
    proximal_S: torch.Tensor,
    advantages_S: torch.Tensor,
    config: LossConfig,
) -> TokenLoss:
    """The configured loss. PPO takes its ratio against pi_prox, or mu if so configured; the others against mu."""
    if isinstance(config, PpoConfig):
        against_S = behaviour_S if config.proximal == "behaviour" else proximal_S
        return ppo_clip(logprobs_S, against_S, advantages_S, config)
    if isinstance(config, CispoConfig):
        return cispo(logprobs_S, behaviour_S, advantages_S, config)
    return dppo(logprobs_S, behaviour_S, advantages_S, config)


def vanishes_without_advantage(config: LossConfig) -> bool:
    """Whether tokens of advantage 0 have no gradient, so that they need not be computed."""
    match config:
        case PpoConfig() | CispoConfig():
            return True
        case DppoConfig():
            return config.kl_weight == 0
