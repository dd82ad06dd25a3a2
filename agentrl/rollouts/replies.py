"""Draws whole replies of an agent: whatever happens to a request on the way, its caller sees one slow reply."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace

import numpy as np

from agentrl.rollouts.episode_log import EpisodeLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.recorded_replies import Generating
from agentrl.telemetry.spans import Asked
from agentrl.types.episode import Ticket
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.message import Message
from agentrl.types.task import Limits


def session_key(ticket: Ticket, agent: str) -> str:
    """Name of one agent's session: fixes its random numbers, and the engine that it stays with."""
    return f"{ticket.seed}/{ticket.episode_id}/{agent}"


class ContextFullError(Exception):
    """No token fits into the context any more; an outcome of the episode, not a failure."""


class TokensSpentError(Exception):
    """The agent has drawn as many tokens as it may in an episode; an outcome, not a failure."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a reply is to continue.

    `new_ids` are the last tokens of `token_ids`, those that are no node of the episode yet; `parent` is the node that
    the others end in. `branch` and a token's position fix its random number. `request` names the reply among all that
    are in the making, and says what it continues. `max_tokens` bounds the reply below the limits of the episode.

    Example: ``Prompt(ids, ids, None, 0, (question,), digest)`` is the first of an episode.
    """

    token_ids: np.ndarray  # [P] int32
    new_ids: np.ndarray  # [m] int32
    parent: int | None
    branch: int
    conversation: tuple[Message, ...]
    request: str
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A whole reply, the seconds that it took, and how often an abort cut it short."""

    generation: Generation
    seconds: float
    aborts: int


class ReplySampler:
    """Draws the replies of one agent, several at once if asked so; those in the making are on record as they grow."""

    def __init__(
        self,
        record: EpisodeRecord,
        agent: str,
        engine: Generating,
        stop_token_ids: tuple[int, ...],
        sampling: Sampling,
        limits: Limits,
        log: EpisodeLog,
    ) -> None:
        self._record, self._agent = record, agent
        self._engine, self._stop_token_ids, self._sampling = engine, stop_token_ids, sampling
        self._limits, self._log = limits, log
        self._key = session_key(record.ticket, agent)
        self._requests = self._sampled_tokens = 0

    async def draw(self, prompt: Prompt) -> Drawn:
        """Draw one whole reply, continuing from prompt and partial output after every abort.

        Waits for: the engine. Unblocked by: the end of the reply, or an error. Parks after an abort if the
        worker is to stop: the part is on record by then.

        Raises:
            ContextFullError: no room for a reply.
            TokensSpentError: no token is left to the agent.
            EpisodeError: the engine failed or broke the contract.
        """
        budget = self._budget(prompt)
        self._sampled_tokens += budget  # of several replies at once, none takes what another may still need
        try:
            drawn = await self._draw(prompt, budget)
        except BaseException:
            self._sampled_tokens -= budget
            raise
        self._sampled_tokens -= budget - len(drawn.generation.token_ids)
        self._record.forget_open(prompt.request)
        return drawn

    async def _draw(self, prompt: Prompt, budget: int) -> Drawn:
        started = time.monotonic()
        partial: Generation | None = None
        asked: list[Asked] = []
        try:
            while True:
                num_done = len(partial.token_ids) if partial else 0
                part = await self._ask(self._request(prompt, partial, budget - num_done), asked)
                partial = part if partial is None else _join(partial, part)
                if part.finish is not FinishReason.ABORT:
                    break
                if len(partial.token_ids) == budget:
                    partial = replace(partial, finish=FinishReason.LENGTH)
                    break
                await self._keep(prompt, partial, part)
        finally:
            # The turn that the reply becomes has this number: nothing is awaited until it is closed.
            self._record.trace.replied(self._record.num_turns, self._agent, asked)
        if not len(partial.token_ids):
            raise EpisodeError(Boundary.CONTRACT, "engine.answer", "a reply without tokens")
        return Drawn(partial, time.monotonic() - started, len(asked) - (part.finish is not FinishReason.ABORT))

    async def _ask(self, request: GenerationRequest, asked: list[Asked]) -> Generation:
        """The engine's answer, which is noted among what was `asked`, and so is one that never came."""
        sent_s = time.monotonic()
        try:
            part = await self._engine.generate(request)
        except BaseException:
            asked.append(Asked(sent_s, time.monotonic()))
            raise
        asked.append(Asked(sent_s, time.monotonic(), part.stood_still, len(part.token_ids)))
        # How long it stood still is no part of the reply, and is not put on record with it.
        return replace(part, stood_still=()) if part.stood_still else part

    async def _keep(self, prompt: Prompt, partial: Generation, part: Generation) -> None:
        """Put a reply in the making on record."""
        if len(partial.token_ids):
            self._record.keep_open(prompt.request, self._agent, prompt.parent, prompt.new_ids, partial)
        if len(part.token_ids):
            await self._log.delivered(part, prompt.request, self._agent)
        self._log.check_parking()

    def _budget(self, prompt: Prompt) -> int:
        room = self._limits.max_context_tokens - len(prompt.token_ids)
        if room <= 0:
            # Agents know by these words, which are OpenAI's, that they must shorten their conversation.
            raise ContextFullError(
                f"This model's maximum context length is {self._limits.max_context_tokens} tokens. However, your "
                f"messages resulted in {len(prompt.token_ids)} tokens."
            )
        bounds = [self._limits.max_reply_tokens, room]
        if prompt.max_tokens is not None:
            bounds.append(prompt.max_tokens)
        if self._limits.max_sampled_tokens is not None:
            bounds.append(self._limits.max_sampled_tokens - self._sampled_tokens)
        if min(bounds) <= 0:
            raise TokensSpentError(f"the {self._limits.max_sampled_tokens} tokens of all replies are spent")
        return min(bounds)

    def _request(self, prompt: Prompt, partial: Generation | None, max_new_tokens: int) -> GenerationRequest:
        token_ids = prompt.token_ids
        if partial is not None and len(partial.token_ids):
            token_ids = np.concatenate([token_ids, partial.token_ids])
        self._requests += 1
        rid = hashlib.blake2b(f"{self._key}/{self._requests}".encode(), digest_size=16).hexdigest()
        seed = hashlib.blake2b(f"{self._key}/{prompt.branch}".encode(), digest_size=7).digest()
        return GenerationRequest(
            rid=rid,
            session=self._key,
            prompt_ids=token_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            sampling=self._sampling,
            seed=int.from_bytes(seed, "little"),
            conversation=prompt.conversation,
            routed_start=self._routed_end(prompt, partial),
        )

    def _routed_end(self, prompt: Prompt, partial: Generation | None) -> int:
        """The first position whose experts are not known: what is on record once is not asked for again."""
        if partial is not None and partial.routed_experts is not None:
            return partial.routed_experts.end
        return self._record.routed_end(prompt.parent)


def _join(first: Generation, second: Generation) -> Generation:
    try:
        return first.followed_by(second)
    except ValueError as error:
        raise EpisodeError(Boundary.CONTRACT, "engine.answer", str(error)) from error
