"""What goes to an engine and what comes back: token ids in, token ids with their provenance out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from agentrl.types.message import Message
from agentrl.types.version import PolicyVersion, VersionSpan


class FinishReason(StrEnum):
    """Why a generation ended; ABORT means that it can be continued."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the reported log-probabilities are of exactly this distribution.

    `top_p` below 1 needs a finite `top_k`: only then can an engine report the set it kept.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut from the distribution before the draw."""
        return self.top_k is not None or self.top_p < 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and what to draw after it.

    `seed` and a token's position in the context decide its random number, so a request that is
    aborted and continued draws what it would have drawn. `session` names the growing context that the
    prompt belongs to, so that a router can keep it on one engine. `expects` is the version that its
    engine is proven to hold when it is sent; tokens are of this version or a newer one. `conversation`
    is the text that the ids stand for; scripted policies read it, the wire never carries it.
    """

    rid: str
    session: str
    prompt_ids: np.ndarray  # [P] int32
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    expects: PolicyVersion | None = None
    conversation: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """Ragged sets of token ids that truncation left, one per sampled token.

    Example: sets ``[5, 7]`` and ``[9]`` are ``ids = [5, 7, 9]``, ``offsets = [0, 2, 3]``.
    """

    ids: np.ndarray  # [M] int32
    offsets: np.ndarray  # [n + 1] int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_lists(cls, sets: list[list[int]]) -> KeptTokens:
        """Build from one list of ids per token."""
        offsets = np.zeros(len(sets) + 1, np.int64)
        np.cumsum([len(kept) for kept in sets], out=offsets[1:])
        return cls(np.asarray([i for kept in sets for i in kept], np.int32), offsets)

    @classmethod
    def concatenate(cls, parts: list[KeptTokens]) -> KeptTokens:
        """Put sets one behind the other."""
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return cls(np.concatenate([part.ids for part in parts]), offsets)


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What an engine delivered for one request; `token_ids` includes the stop token.

    Example: ids ``[93, 1]``, logprobs ``[-0.1, -0.01]``, one span of version 0.4, finish STOP.
    """

    token_ids: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32, nats, of the distribution the token was drawn from
    versions: tuple[VersionSpan, ...]  # tiles [0, n)
    kv_versions: tuple[VersionSpan, ...]  # tiles [0, n): oldest weights whose KV the token attended to
    finish: FinishReason
    kept_tokens: KeptTokens | None = None
    cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
