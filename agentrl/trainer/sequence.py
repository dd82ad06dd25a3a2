"""One trajectory as the trainer sees it: what to compute and what enters the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.types.generation import KeptTokens
from agentrl.types.trajectory import NOT_ROUTED, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """L tokens of one branch, S of which enter the loss.

    Example: prompt [5, 6], reply [7, 8] of log-probabilities -.1 and -2.3 and advantage .5, mean over
    these two tokens: ``selected [2, 3]``, ``advantages [.5, .5]``, ``scales [.5, .5]``.
    """

    token_ids: np.ndarray  # [L] int32
    selected: np.ndarray  # [S] positions that enter the loss, each at least 1
    logprobs: np.ndarray  # [S] of the sampling policy
    advantages: np.ndarray  # [S]
    scales: np.ndarray  # [S]
    turns: np.ndarray  # [S]
    staleness: np.ndarray  # [S] steps since the weights that drew the token, 0 only where it is fresh
    kept_tokens: KeptTokens | None  # one set per selected token
    routed_experts: np.ndarray | None = None  # [L, layers, top_k] int16, -1 where unknown
    teacher_logprobs: np.ndarray | None = None  # [S], None without a teacher's


def replayed_fraction(sequences: Sequence[TokenSequence]) -> float:
    """Share of the tokens whose experts are those of the engine; 0 for a model without experts."""
    known = [s.routed_experts[:, 0, 0] != NOT_ROUTED for s in sequences if s.routed_experts is not None]
    return sum(int(mask.sum()) for mask in known) / max(sum(len(s.token_ids) for s in sequences), 1)


def supervised_sequence(trajectory: Trajectory) -> TokenSequence:
    """A trajectory whose sampled tokens are to become likelier, all alike."""
    selected = np.flatnonzero(trajectory.sampled)
    ones = np.ones(len(selected), np.float32)
    return TokenSequence(
        token_ids=trajectory.token_ids[: int(selected[-1]) + 1],
        selected=selected,
        logprobs=trajectory.logprobs[selected],
        advantages=ones,
        scales=ones,
        turns=trajectory.turns[selected],
        staleness=np.zeros(len(selected), np.int32),
        kept_tokens=None,
    )
