"""What an algorithm makes of each token: its loss, its weight, and its status in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algorithms.config import AlgorithmConfig, is_corrected_by_loss
from agentrl.algorithms.correction import correction_weights
from agentrl.algorithms.credit import teacher_advantages
from agentrl.algorithms.credit_config import TeacherCreditConfig
from agentrl.algorithms.losses import TokenLoss, token_loss
from agentrl.types.explanation import TokenStatus


@dataclass(frozen=True, slots=True)
class TokenOutcome:
    """A token's share of the loss is its weight times its loss.

    `gap_S` is log pi - log mu, `moved_S` is log pi - log pi_prox, `advantages_S` what entered the loss,
    `teacher_gap_S` log pi - log pi_T, NaN where unknown; None without a teacher.
    """

    gap_S: torch.Tensor
    moved_S: torch.Tensor
    weights_S: torch.Tensor
    losses: TokenLoss
    advantages_S: torch.Tensor
    teacher_gap_S: torch.Tensor | None = None


def token_outcome(
    logprobs_S: torch.Tensor,
    behaviour_S: torch.Tensor,
    advantages_S: torch.Tensor,
    turns_S: torch.Tensor,
    sequences_S: torch.Tensor,
    config: AlgorithmConfig,
    proximal_S: torch.Tensor | None = None,
    teacher_S: torch.Tensor | None = None,
) -> TokenOutcome:
    """Loss and correction weight of each token; only the loss is differentiable.

    Example: drawn with probability .2, now .4 likely, and .3 before the first optimizer step on its batch. The
    correction's ratio is .3 / .2 = 1.5, PPO's .4 / .3 = 1.33, beyond 1.28: with advantage 1 the token's loss is
    -1.28 times the weight 1.5, without a gradient.

    Args:
        logprobs_S: log pi, nats.
        behaviour_S: log mu, nats.
        advantages_S: A.
        turns_S: number of each token's turn, unique within its sequence.
        sequences_S: number of each token's sequence.
        config: loss and correction.
        proximal_S: log pi_prox, nats: of the weights before the first optimizer step on the batch. None where those
            are the weights of `logprobs_S`, as in a batch's only optimizer step: no second forward pass is needed.
        teacher_S: log pi_T, nats, NaN where unknown: what the credit's teacher says, whose term joins the advantage.
    """
    now_S = logprobs_S.detach()
    start_S = now_S if proximal_S is None else proximal_S
    weights_S = correction_weights(start_S - behaviour_S, turns_S, sequences_S, config.correction)
    if is_corrected_by_loss(config.loss):
        weights_S = (weights_S > 0).float()
    if teacher_S is not None and isinstance(config.credit, TeacherCreditConfig):
        advantages_S = teacher_advantages(advantages_S, now_S, teacher_S, config.credit.weight)
    losses = token_loss(logprobs_S, behaviour_S, start_S, advantages_S, config.loss)
    teacher_gap_S = None if teacher_S is None else now_S - teacher_S
    return TokenOutcome(now_S - behaviour_S, now_S - start_S, weights_S, losses, advantages_S, teacher_gap_S)


def token_statuses(outcome: TokenOutcome, mismatched_S: torch.Tensor) -> list[TokenStatus]:
    """Status of each of the S tokens: mismatched before rejected, and rejected before clipped."""
    rejected = (outcome.weights_S == 0).tolist()
    clipped = outcome.losses.clipped_S.tolist()
    is_above = (outcome.losses.ratio_S > 1).tolist()
    return [_status(*token) for token in zip(mismatched_S.tolist(), rejected, clipped, is_above, strict=True)]


def _status(is_mismatched: bool, is_rejected: bool, is_clipped: bool, is_above: bool) -> TokenStatus:
    if is_mismatched:
        return TokenStatus.MISMATCHED
    if is_rejected:
        return TokenStatus.REJECTED
    if is_clipped:
        return TokenStatus.CLIPPED_HIGH if is_above else TokenStatus.CLIPPED_LOW
    return TokenStatus.KEPT
