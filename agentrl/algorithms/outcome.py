"""What an algorithm makes of each token: its loss, its weight, and its fate in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.correction import correction_weights
from agentrl.algorithms.losses import TokenLoss, is_corrected_by_loss, token_loss
from agentrl.types.explanation import Fate


@dataclass(frozen=True, slots=True)
class TokenOutcome:
    """A token's share of the loss is its weight times its loss; `gap_S` is log pi - log mu."""

    gap_S: torch.Tensor
    weights_S: torch.Tensor
    losses: TokenLoss


def token_outcome(
    logprobs_S: torch.Tensor,
    behaviour_S: torch.Tensor,
    advantages_S: torch.Tensor,
    turns_S: torch.Tensor,
    sequences_S: torch.Tensor,
    config: AlgorithmConfig,
) -> TokenOutcome:
    """Loss and correction weight of each token; only the loss is differentiable.

    Args:
        logprobs_S: log pi, nats.
        behaviour_S: log mu, nats.
        advantages_S: A.
        turns_S: number of each token's turn, unique within its sequence.
        sequences_S: number of each token's sequence.
        config: loss and correction.
    """
    gap_S = logprobs_S.detach() - behaviour_S
    weights_S = correction_weights(gap_S, turns_S, sequences_S, config.correction)
    if is_corrected_by_loss(config.loss):
        weights_S = (weights_S > 0).float()
    return TokenOutcome(gap_S, weights_S, token_loss(logprobs_S, behaviour_S, advantages_S, config.loss))


def token_fates(outcome: TokenOutcome) -> list[Fate]:
    """Fate of each of the S tokens; of one that is both rejected and clipped, rejected."""
    rejected = (outcome.weights_S == 0).tolist()
    clipped = outcome.losses.clipped_S.tolist()
    is_above = (outcome.losses.ratio_S > 1).tolist()
    return [_fate(*token) for token in zip(rejected, clipped, is_above, strict=True)]


def _fate(is_rejected: bool, is_clipped: bool, is_above: bool) -> Fate:
    if is_rejected:
        return Fate.REJECTED
    if is_clipped:
        return Fate.CLIPPED_HIGH if is_above else Fate.CLIPPED_LOW
    return Fate.KEPT
