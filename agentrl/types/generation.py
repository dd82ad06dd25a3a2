"""What goes to an engine and what comes back: token ids in, token ids with their provenance out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import numpy as np

from agentrl.types.message import Message
from agentrl.types.version import PolicyVersion, VersionSpan, append_spans


class FinishReason(StrEnum):
    """Why a generation ended; ABORT means that it can be continued."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the reported log-probabilities are of exactly this distribution.

    `top_p` below 1 needs a finite `top_k`: only then can an engine report the set it kept. `routing` asks a
    mixture-of-experts model to report its experts too; it is ``(layers, experts per token)`` of the model,
    which an engine's answer does not say.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    routing: tuple[int, int] | None = None

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
    `routed_start` is the first position whose experts are not on record yet; read only where the sampling
    asks for routing.
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
    routed_start: int = 0


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
class RoutedExperts:
    """The experts that an engine chose at context positions ``[start, start + m)``, in every layer.

    Layers without experts have a row as well, which means nothing.

    Example: a model of 2 layers that chooses 2 of 8 experts, asked from position 5 on for a prompt of 6 and
    a reply of 3 tokens, reports positions 5, 6 and 7 (token 8 has not been forwarded): ``start 5``, ``experts``
    of shape ``[3, 2, 2]`` and dtype uint8.
    """

    start: int
    experts: np.ndarray  # [m, layers, top_k], the narrowest unsigned dtype that holds the ids

    @property
    def end(self) -> int:
        """The first position behind the record."""
        return self.start + len(self.experts)

    @classmethod
    def narrow(cls, start: int, experts: np.ndarray) -> RoutedExperts:
        """Keep expert ids in no more bytes than they need.

        Raises:
            ValueError: an id is negative.
        """
        if experts.size and experts.min() < 0:
            raise ValueError(f"expert {experts.min()} does not exist")
        return cls(start, experts.astype(np.min_scalar_type(int(experts.max(initial=0)))))

    @classmethod
    def concatenate(cls, parts: list[RoutedExperts]) -> RoutedExperts:
        """Put records one behind the other. Raises ValueError if they do not tile."""
        for before, after in pairwise(parts):
            if after.start != before.end:
                raise ValueError(f"routed experts from {after.start} on do not follow those up to {before.end}")
        return cls(parts[0].start, np.concatenate([part.experts for part in parts]))


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What an engine delivered for one request; `token_ids` includes the stop token.

    `regenerated_tokens` were drawn before at most: in answers that were lost with their engine, or not believed.
    `stood_still` are stretches, in seconds since the router was asked, in which the request waited for new weights.

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
    routed_experts: RoutedExperts | None = None  # up to the position before the last token
    regenerated_tokens: int = 0
    stood_still: tuple[tuple[float, float], ...] = ()

    def followed_by(self, rest: Generation) -> Generation:
        """A part of a reply and the rest of it as one, with the end of the rest.

        Raises:
            ValueError: the records of routed experts do not tile.
        """
        parts = (self, rest)
        kept = [part.kept_tokens for part in parts if part.kept_tokens is not None]
        routed = [part.routed_experts for part in parts if part.routed_experts is not None]
        return Generation(
            token_ids=np.concatenate([self.token_ids, rest.token_ids]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            versions=append_spans(self.versions, rest.versions),
            kv_versions=append_spans(self.kv_versions, rest.kv_versions),
            finish=rest.finish,
            kept_tokens=KeptTokens.concatenate(kept) if kept else None,
            cached_tokens=self.cached_tokens,
            routed_experts=RoutedExperts.concatenate(routed) if routed else None,
            regenerated_tokens=self.regenerated_tokens + rest.regenerated_tokens,
        )
