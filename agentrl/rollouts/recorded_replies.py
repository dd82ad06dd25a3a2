"""Durable execution: a scaffold is run again from its start against what is on record, up to the last turn.

It must ask for the same: every request is matched by the digest of its tokens, every action by its tool calls. One
that does not is a failure of the scaffold that says so; going on would put replies behind prompts that they do
not answer.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np

from agentrl.journal.entries import TurnCommitted
from agentrl.journal.history import EpisodeHistory
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest


class Generating(Protocol):
    """The one call of an engine that a session makes."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue a prompt."""


def request_digest(context_ids: np.ndarray) -> str:
    """Digest of the context that a reply continues."""
    return hashlib.blake2b(np.ascontiguousarray(context_ids, np.int32).tobytes(), digest_size=12).hexdigest()


def nondeterministic(where: str) -> EpisodeError:
    """The failure of a scaffold that did not do the same again."""
    return EpisodeError(
        Boundary.SCAFFOLD,
        "nondeterministic",
        f"run again, the scaffold differs from its record at {where}; it must take time, randomness and I/O only "
        "through its context",
    )


class RecordedReplies:
    """What is on record of an episode's replies, handed out once, in the order in which its agents got them."""

    def __init__(self, history: EpisodeHistory) -> None:
        self._turns, self._parts = list(history.turns), list(history.parts)
        self._num_replayed = 0
        self._is_reply_open = False

    def take(self, agent: str, request: GenerationRequest) -> Generation | None:
        """The recorded answer to the next request, or None behind the last.

        Raises:
            EpisodeError: the request is not the recorded one (boundary scaffold, kind nondeterministic).
        """
        if self._turns:
            turned = self._turns.pop(0)
            self._check(turned.request, request, turned.turn.agent, agent)
            self._num_replayed += 1
            return _generation_of(turned)
        if not self._parts:
            return None
        part = self._parts.pop(0)
        if not self._is_reply_open:  # later parts continue the reply that the first one begins
            self._check(part.request, request, agent, agent)
            self._is_reply_open = True
        return part.generation

    def _check(self, expected: str, request: GenerationRequest, of_agent: str, agent: str) -> None:
        if request_digest(request.prompt_ids) != expected or of_agent != agent:
            raise nondeterministic(f"the prompt of turn {self._num_replayed}")


class ReplayingEngine:
    """Answers an agent with recorded replies while there are any, then with the parts of the open one, then for real.

    Example: of two recorded turns and one part, the first two requests get whole replies, the third gets the
    part as if it had just been aborted, and its continuation goes to the engine.
    """

    def __init__(self, replies: RecordedReplies, agent: str, engine: Generating) -> None:
        self._replies, self._agent, self._engine = replies, agent, engine

    async def generate(self, request: GenerationRequest) -> Generation:
        """The recorded answer, or the engine's. Raises EpisodeError if the request is not the recorded one."""
        recorded = self._replies.take(self._agent, request)
        return await self._engine.generate(request) if recorded is None else recorded


def _generation_of(turned: TurnCommitted) -> Generation:
    """A recorded reply as the engine gave it."""
    node = turned.nodes[-1]
    sample = node.sample
    if sample is None:
        raise EpisodeError(Boundary.CONTRACT, "journal", f"turn {turned.turn.index} has no sampled reply on record")
    return Generation(
        token_ids=node.token_ids,
        logprobs=sample.logprobs,
        versions=sample.versions,
        kv_versions=sample.kv_versions,
        finish=FinishReason(turned.finish),
        kept_tokens=sample.kept_tokens,
        routed_experts=sample.routed_experts,
    )
