"""A session: one agent's conversation with a policy, exact in tokens and append-only.

The only place where text meets tokens. A turn renders what is new and sends ids; whatever happens to
the request on the way (weights are swapped, the engine is paused), the caller sees one slow reply.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.rollouts.episode_log import EpisodeLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.recorded_replies import Generating, request_digest
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Node, SampledColumns, Ticket
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, KeptTokens, RoutedExperts, Sampling
from agentrl.types.message import Message, ToolSpec
from agentrl.types.task import Limits
from agentrl.types.version import append_spans

_FIRST_CAPACITY = 256


def session_key(ticket: Ticket, agent: str) -> str:
    """Name of one agent's session: fixes its random numbers, and the engine that it stays with."""
    return f"{ticket.seed}/{ticket.episode_id}/{agent}"


class ContextFullError(Exception):
    """No token fits into the context any more; an outcome of the episode, not a failure."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A policy's reply: as a message, as a node of the episode, why it ended, and the digest of what it continues."""

    message: Message
    node: Node
    finish: FinishReason
    request: str


class Session:
    """The token prefix of one agent and the nodes that it is made of.

    Invariant: the context is the concatenation of the nodes from the root to `leaf`. It only grows,
    except that `rewrite` starts a branch at the longest prefix of nodes that the new text shares.

    Example: ``generate([user])`` adds a prompt node of 24 ids and a reply node of 13; the next
    ``generate([tool])`` adds a node of 27 ids (the tool's result and what the template puts around it)
    and the next reply, and costs no more than these.
    """

    def __init__(
        self,
        record: EpisodeRecord,
        agent: str,
        chat: ChatFormat,
        engine: Generating,
        sampling: Sampling,
        limits: Limits,
        log: EpisodeLog,
    ) -> None:
        self._record, self._agent = record, agent
        self._chat, self._engine, self._log = chat, engine, log
        self._sampling, self._limits = sampling, limits
        self._key = session_key(record.ticket, agent)
        self._messages: list[Message] = []
        self._context = np.empty(_FIRST_CAPACITY, np.int32)
        self._length = 0
        self._path: list[Node] = []
        self._branch = 0
        self._requests = 0
        self.aborts = 0

    async def generate(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Reply:
        """Put messages behind the conversation and let the policy reply.

        Raises:
            ContextFullError: no room for a reply.
            EpisodeError: the engine failed or broke the contract.
        """
        self._messages.extend(messages)
        if not self._path:
            self._append(self._chat.open(self._messages, tools))
            return await self._reply(tools)
        reply = self._path[-1].token_ids
        tail = self._path[-2].token_ids
        history = self._context[: self._length - len(reply)]
        piece = self._chat.extend(tail, reply, messages, tools, history)
        if piece is None:
            self._start_branch(tools)
        else:
            self._append(piece)
        return await self._reply(tools)

    async def rewrite(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Reply:
        """Replace the conversation and let the policy reply, on a branch of the episode."""
        self._messages = list(messages)
        self._start_branch(tools)
        return await self._reply(tools)

    def _start_branch(self, tools: Sequence[ToolSpec]) -> None:
        """Go back to the last node that the newly rendered conversation still begins with."""
        ids = self._chat.open(self._messages, tools)
        kept: list[Node] = []
        length = 0
        for node in self._path:
            end = length + len(node.token_ids)
            if end >= len(ids) or not np.array_equal(ids[length:end], node.token_ids):
                break
            kept.append(node)
            length = end
        self._path, self._length = kept, length
        self._branch += 1
        self._append(ids[length:])

    async def _reply(self, tools: Sequence[ToolSpec]) -> Reply:
        started = time.monotonic()
        aborts = self.aborts
        request = request_digest(self._context[: self._length])
        generation = await self._sample(request)
        node = self._add_reply(generation, is_open=False)
        self._path.append(node)
        self._grow(generation.token_ids)
        seconds, again = time.monotonic() - started, generation.regenerated_tokens
        turn = self._record.add_turn(self._agent, node, seconds, self.aborts - aborts, again)
        prefix = f"{self._record.ticket.episode_id}/{turn.index}."
        message = self._chat.parse(generation.token_ids, tools, prefix, self._path[-2].token_ids)
        self._messages.append(message)
        return Reply(message, node, generation.finish, request)

    async def _sample(self, request: str) -> Generation:
        """Draw one whole reply, continuing from prompt and partial output after every abort.

        Waits for: the engine. Unblocked by: the end of the reply, or an error. Parks after an abort if the
        worker is to stop: the part is on record by then.
        """
        room = self._limits.max_context_tokens - self._length
        budget = min(self._limits.max_reply_tokens, room)
        if budget <= 0:
            raise ContextFullError(f"context of {self._length} tokens is full")
        partial: Generation | None = None
        while True:
            num_done = len(partial.token_ids) if partial else 0
            part = await self._engine.generate(self._request(partial, budget - num_done))
            partial = part if partial is None else _join(partial, part)
            if part.finish is not FinishReason.ABORT:
                if not len(partial.token_ids):
                    raise EpisodeError(Boundary.CONTRACT, "engine.answer", "a reply without tokens")
                return partial
            self.aborts += 1
            if len(partial.token_ids) == budget:
                return replace(partial, finish=FinishReason.LENGTH)
            if len(partial.token_ids):
                self._add_reply(partial, is_open=True)
            if len(part.token_ids):
                await self._log.delivered(part, request, self._agent)
            self._log.check_parking()

    def _request(self, partial: Generation | None, max_new_tokens: int) -> GenerationRequest:
        prompt = self._context[: self._length]
        if partial is not None and len(partial.token_ids):
            prompt = np.concatenate([prompt, partial.token_ids])
        self._requests += 1
        rid = hashlib.blake2b(f"{self._key}/{self._requests}".encode(), digest_size=16).hexdigest()
        seed = hashlib.blake2b(f"{self._key}/{self._branch}".encode(), digest_size=7).digest()
        return GenerationRequest(
            rid=rid,
            session=self._key,
            prompt_ids=prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self._chat.stop_token_ids,
            sampling=self._sampling,
            seed=int.from_bytes(seed, "little"),
            conversation=tuple(self._messages),
            routed_start=self._routed_end(partial),
        )

    def _routed_end(self, partial: Generation | None) -> int:
        """The first position whose experts are not known: what is on record once is not asked for again."""
        if partial is not None and partial.routed_experts is not None:
            return partial.routed_experts.end
        return self._record.routed_end(self._leaf)

    def _append(self, ids: np.ndarray) -> None:
        """Add tokens that the policy did not draw."""
        node = self._record.add_node(self._leaf, self._agent, ids)
        self._path.append(node)
        self._grow(ids)

    def _add_reply(self, generation: Generation, is_open: bool) -> Node:
        sample = SampledColumns(
            logprobs=generation.logprobs,
            versions=generation.versions,
            kv_versions=generation.kv_versions,
            kept_tokens=generation.kept_tokens,
            routed_experts=generation.routed_experts,
        )
        return self._record.add_node(self._leaf, self._agent, generation.token_ids, sample, is_open)

    def _grow(self, ids: np.ndarray) -> None:
        length = self._length + len(ids)
        if length > len(self._context):
            grown = np.empty(max(length, 2 * len(self._context)), np.int32)
            grown[: self._length] = self._context[: self._length]
            self._context = grown
        self._context[self._length : length] = ids
        self._length = length

    @property
    def _leaf(self) -> int | None:
        return self._path[-1].index if self._path else None


def _join(first: Generation, second: Generation) -> Generation:
    """Two parts of one reply as one, with the end of the second."""
    kept = [part.kept_tokens for part in (first, second) if part.kept_tokens is not None]
    routed = [part.routed_experts for part in (first, second) if part.routed_experts is not None]
    return Generation(
        token_ids=np.concatenate([first.token_ids, second.token_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        versions=append_spans(first.versions, second.versions),
        kv_versions=append_spans(first.kv_versions, second.kv_versions),
        finish=second.finish,
        kept_tokens=KeptTokens.concatenate(kept) if kept else None,
        cached_tokens=first.cached_tokens,
        routed_experts=_join_routing(routed),
        regenerated_tokens=first.regenerated_tokens + second.regenerated_tokens,
    )


def _join_routing(parts: list[RoutedExperts]) -> RoutedExperts | None:
    try:
        return RoutedExperts.concatenate(parts) if parts else None
    except ValueError as error:
        raise EpisodeError(Boundary.CONTRACT, "engine.answer", str(error)) from error
