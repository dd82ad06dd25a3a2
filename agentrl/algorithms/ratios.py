"""Ratios of probabilities that cannot overflow."""

from __future__ import annotations

import torch

_MAX_LOG_RATIO = 20.0


def safe_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Exp of a log-ratio clamped to +-20, in float32; non-finite entries count as log-ratio 0."""
    finite = torch.nan_to_num(log_ratio.float(), nan=0.0, posinf=0.0, neginf=0.0)
    return finite.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
