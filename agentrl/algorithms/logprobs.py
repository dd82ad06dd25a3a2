"""Log-probabilities of chosen tokens from hidden states, without the whole [S, V] table at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

HeadLogits = Callable[[torch.Tensor], torch.Tensor]


def chunked_logprobs(
    hidden_SH: torch.Tensor,
    head_logits: HeadLogits,
    targets_S: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Log pi(target) for each row, of the distribution that was sampled from; differentiable.

    Logits of a chunk exist only while it is computed, in the backward pass too. With `kept` the
    distribution is renormalised over the tokens that truncation had left, so that it is the engine's.
    Without targets the head still takes part, with a gradient of zero: ranks reduce gradients of the same weights.

    Args:
        hidden_SH: hidden states at the positions before the targets.
        head_logits: hidden states [C, H] to logits [C, V], float32 or float64.
        targets_S: token ids.
        temperature: logits are divided by it; 0 counts as 1, as engines report it.
        chunk_tokens: rows that are computed together.
        kept: ids [M] and offsets [S + 1] of the kept sets, each with its target in it.

    Returns:
        logprobs_S, of the logits' dtype.
    """
    parts = []
    for start in range(0, max(len(targets_S), 1), chunk_tokens):
        stop = min(start + chunk_tokens, len(targets_S))
        kept_chunk = None if kept is None else (kept[0], kept[1][start : stop + 1])
        inputs = (hidden_SH[start:stop], head_logits, targets_S[start:stop], temperature or 1.0, kept_chunk)
        parts.append(checkpoint(_chunk_logprobs, *inputs, use_reentrant=False))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _chunk_logprobs(
    hidden_CH: torch.Tensor,
    head_logits: HeadLogits,
    targets_C: torch.Tensor,
    temperature: float,
    kept: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    logits_CV = head_logits(hidden_CH) / temperature
    chosen_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
    if kept is None:
        return chosen_C - logits_CV.logsumexp(-1)
    return chosen_C - _kept_logsumexp(logits_CV, *kept)


def _kept_logsumexp(logits_CV: torch.Tensor, ids_M: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Logsumexp of each row over its kept ids only."""
    sizes_C = offsets.diff()
    rows_K = torch.arange(len(sizes_C), device=logits_CV.device).repeat_interleave(sizes_C)
    is_kept_CV = torch.zeros_like(logits_CV, dtype=torch.bool)
    is_kept_CV[rows_K, ids_M[int(offsets[0]) : int(offsets[-1])]] = True
    return logits_CV.masked_fill(~is_kept_CV, float("-inf")).logsumexp(-1)
