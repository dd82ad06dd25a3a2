"""Turns as scorers see them, and what they say of each."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.types.errors import Boundary, EpisodeError, Failure

DIGEST_BYTES = 12


@dataclass(frozen=True, slots=True)
class TurnKey:
    """Names one turn of one episode; `digest` is of the tokens up to its end, so that no score joins another turn.

    Example: ``TurnKey("sql-000012-3", "agent", 1, "9f0c...")``.
    """

    episode_id: str
    agent: str
    turn: int
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTurn:
    """A turn for scorers: everything that its agent had in its context, up to the end of its reply.

    The reply was drawn from the state `token_ids[:reply_start]`, which ends in what the environment said last, and
    leads to the state `token_ids`. `policy` is the one that drew it, whose tokenizer the ids are of. `task` is the
    task's payload.

    Example: a prompt of 19 tokens and a reply of 12 give ``token_ids`` of 31 and ``reply_start`` 19.
    """

    key: TurnKey
    policy: str
    token_ids: np.ndarray  # [L] int32
    reply_start: int
    environment: str = ""
    task: dict[str, Any] = field(default_factory=dict)

    @property
    def num_reply_tokens(self) -> int:
        """Tokens of the reply."""
        return len(self.token_ids) - self.reply_start


@dataclass(frozen=True, slots=True, eq=False)
class TurnScore:
    """What a scorer says of one turn; without any value `failure` says why. Nothing absent is ever read as 0.

    `value` is of the state that the reply leads to, `prior` of the state that it was drawn from; a scorer may give
    either or both. `logprobs` are another policy's of the reply's tokens, in nats at temperature 1. `version` names
    what said it; `note` is for a person.

    Example: ``TurnScore(key, "prm:4f1a", value=.8, prior=.6)``.
    """

    key: TurnKey
    version: str
    value: float | None = None
    prior: float | None = None
    logprobs: np.ndarray | None = None  # [n] float32, one for each token of the reply
    failure: Failure | None = None
    note: str = ""


def check_turn_score(turn: ScoredTurn, score: TurnScore) -> TurnScore:
    """The score itself if it is of this turn, says something, and all that it says is finite.

    Raises:
        EpisodeError: boundary scorer; kind identity, value or shape.
    """
    if score.key != turn.key:
        raise EpisodeError(Boundary.SCORER, "identity", f"asked of {turn.key}, answered of {score.key}")
    if score.failure is not None:
        return score
    if type(score.version) is not str or type(score.note) is not str:
        raise EpisodeError(Boundary.SCORER, "value", f"version or note of {turn.key} is no text")
    numbers = [number for number in (score.value, score.prior) if number is not None]
    if not numbers and score.logprobs is None:
        raise EpisodeError(Boundary.SCORER, "value", f"nothing was said of {turn.key}")
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise EpisodeError(Boundary.SCORER, "value", f"{numbers} of {turn.key} are not finite numbers")
    if score.logprobs is not None:
        if score.logprobs.shape != (turn.num_reply_tokens,):
            found = f"{score.logprobs.shape} log-probabilities for {turn.num_reply_tokens} tokens of {turn.key}"
            raise EpisodeError(Boundary.SCORER, "shape", found)
        if not np.isfinite(score.logprobs).all():
            raise EpisodeError(Boundary.SCORER, "value", f"a log-probability of {turn.key} is not finite")
    return score


def token_digest(token_ids: np.ndarray) -> str:
    """Digest of a token prefix."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, np.int32).tobytes(), digest_size=DIGEST_BYTES).hexdigest()
