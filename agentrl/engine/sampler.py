"""Draws tokens: counter-based randomness, truncation with the kept set, exact log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.engine.request import DrawParams

_ROUNDING = 2.0**20


@dataclass(frozen=True, slots=True)
class Draw:
    """Drawn tokens of n rows; `logprobs` are temperature-scaled over the whole vocabulary.

    `kept_ids` and `kept_logprobs` (renormalised over the kept set) are filled for rows that truncate
    or take the likeliest token, and None elsewhere.
    """

    tokens: list[int]
    logprobs: list[float]
    kept_ids: list[list[int] | None]
    kept_logprobs: list[float | None]


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position), by two rounds of splitmix64; [n] float64."""
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64)) ^ positions.astype(np.uint64)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits_NV: torch.Tensor, params: Sequence[DrawParams], positions: np.ndarray, rounds: bool) -> Draw:
    """Draw one token for each row of logits.

    Args:
        logits_NV: at the last position of each row.
        params: of each row.
        positions: context length of each row, the counter of its random number; [N].
        rounds: round log-probabilities to a grid of 2**-20.
    """
    num_rows = len(params)
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], dtype=logits_NV.dtype)
    logprobs_NV = (logits_NV / temperatures.to(logits_NV.device)[:, None]).log_softmax(-1)
    seeds = np.asarray([p.seed for p in params], np.int64)
    numbers_N = torch.from_numpy(uniforms(seeds, positions)).to(logits_NV.device)
    tokens_N = invert(logprobs_NV.exp(), numbers_N)
    kept_ids: list[list[int] | None] = [None] * num_rows
    kept_logprobs: list[float | None] = [None] * num_rows
    for row, param in enumerate(params):
        if param.temperature == 0:
            tokens_N[row] = logprobs_NV[row].argmax()
            kept_ids[row], kept_logprobs[row] = [int(tokens_N[row])], 0.0
        elif param.truncates:
            kept_V, kept_lp = _truncate(logprobs_NV[row], param)
            choice = int(invert(kept_lp.exp()[None], numbers_N[row : row + 1])[0])
            tokens_N[row] = kept_V[choice]
            kept_ids[row], kept_logprobs[row] = kept_V.tolist(), _rounded(float(kept_lp[choice]), rounds)
    chosen = logprobs_NV.gather(1, tokens_N[:, None])[:, 0].tolist()
    return Draw(tokens_N.tolist(), [_rounded(value, rounds) for value in chosen], kept_ids, kept_logprobs)


def invert(probs_NV: torch.Tensor, numbers_N: torch.Tensor) -> torch.Tensor:
    """The first id of each row whose cumulative probability exceeds the number, never one of probability 0; [N] int64.

    Sums are in float64: in float32 those of 150,000 probabilities stand still at small ones, whose tokens could then
    never be drawn, and a number close to 1 would become 1, which no sum exceeds.

    Args:
        probs_NV: probabilities, which need not add up to exactly 1.
        numbers_N: in [0, 1), float64.
    """
    cumulative_NV = probs_NV.cumsum(-1, dtype=torch.float64).masked_fill_(probs_NV == 0, 0.0)
    total_N1 = cumulative_NV.amax(-1, keepdim=True)
    # A product with a number below 1 can still round to the total.
    wanted_N1 = torch.minimum(numbers_N[:, None] * total_N1, total_N1.nextafter(torch.zeros_like(total_N1)))
    return (cumulative_NV > wanted_N1).byte().argmax(-1)


def _truncate(logprobs_V: torch.Tensor, param: DrawParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that top-k and top-p keep, likeliest first, and their renormalised log-probabilities."""
    limit = min(param.top_k or len(logprobs_V), len(logprobs_V))
    # Normalised again, since in float32 they add up to 1 less closely than the last kept probabilities need.
    top, ids = logprobs_V.double().log_softmax(-1).topk(limit)
    probs = top.exp()
    is_kept = probs.cumsum(-1) - probs < (param.top_p if param.top_p < 1.0 else torch.inf)
    is_kept[0] = True
    return ids[is_kept], top[is_kept] - top[is_kept].logsumexp(-1)


def _rounded(value: float, rounds: bool) -> float:
    return round(value * _ROUNDING) / _ROUNDING if rounds else value


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed
