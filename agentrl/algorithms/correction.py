"""Weights for tokens that another policy sampled than the one that is trained."""

from __future__ import annotations

import torch

from agentrl.algorithms.config import CorrectionConfig, IcePopConfig, NoCorrectionConfig, TisConfig
from agentrl.algorithms.ratios import safe_exp


def correction_weights(
    log_ratio_S: torch.Tensor, turns_S: torch.Tensor, sequences_S: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """Detached weight of each token, from d = log pi_prox - log mu.

    - ``tis``: min(exp D, cap), D = d of the token, or its sum over the token's turn or sequence.
    - ``icepop``: exp d within [low, high], else 0. The denominator keeps counting such tokens.

    Args:
        log_ratio_S: d.
        turns_S: number of each token's turn, unique within its sequence.
        sequences_S: number of each token's sequence.
        config: as above.
    """
    if isinstance(config, NoCorrectionConfig):
        return torch.ones_like(log_ratio_S, dtype=torch.float32).detach()
    if isinstance(config, IcePopConfig):
        ratio_S = safe_exp(log_ratio_S.detach())
        return ratio_S * ((ratio_S >= config.low) & (ratio_S <= config.high))
    return safe_exp(_level_sum(log_ratio_S.detach(), turns_S, sequences_S, config)).clamp(max=config.cap)


def _level_sum(
    log_ratio_S: torch.Tensor, turns_S: torch.Tensor, sequences_S: torch.Tensor, config: TisConfig
) -> torch.Tensor:
    if config.level == "token":
        return log_ratio_S
    keys = sequences_S if config.level == "sequence" else torch.stack([sequences_S, turns_S], 1)
    _, segment_S = keys.unique(return_inverse=True, dim=0)
    return torch.zeros_like(log_ratio_S).index_add(0, segment_S, log_ratio_S)[segment_S]
