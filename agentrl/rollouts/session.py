"""A session: one agent's conversation with a policy, exact in tokens and append-only.

The only place where text meets tokens. A turn renders what is new and sends ids; whatever happens to
the request on the way (weights are swapped, the engine is paused), the caller sees one slow reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.rollouts.episode_log import EpisodeLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.recorded_replies import Generating, request_digest
from agentrl.rollouts.replies import Prompt, ReplySampler
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Node, SampledColumns
from agentrl.types.generation import FinishReason, Sampling
from agentrl.types.message import Message, ToolSpec
from agentrl.types.task import Limits

_FIRST_CAPACITY = 256


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
        self._chat = chat
        self._sampler = ReplySampler(record, agent, engine, chat.stop_token_ids, sampling, limits, log)
        self._messages: list[Message] = []
        self._context = np.empty(_FIRST_CAPACITY, np.int32)
        self._length = 0
        self._path: list[Node] = []
        self._branch = 0

    @property
    def context_tokens(self) -> int:
        """Tokens of the context: all whole replies and what was put between them, on the present branch."""
        return self._length

    async def generate(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Reply:
        """Put messages behind the conversation and let the policy reply.

        Raises:
            ContextFullError: no room for a reply.
            TokensSpentError: no token is left to the agent.
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
        context = self._context[: self._length]
        request = request_digest(context)
        nothing_new = context[self._length :]
        prompt = Prompt(context, nothing_new, self._leaf, self._branch, tuple(self._messages), request)
        drawn = await self._sampler.draw(prompt)
        generation = drawn.generation
        node = self._record.add_node(self._leaf, self._agent, generation.token_ids, SampledColumns.of(generation))
        self._path.append(node)
        self._grow(generation.token_ids)
        turn = self._record.add_turn(self._agent, node, drawn.seconds, drawn.aborts, generation.regenerated_tokens)
        prefix = f"{self._record.ticket.player_of(turn.index)}/{turn.index}."
        message = self._chat.parse(generation.token_ids, tools, prefix, self._path[-2].token_ids)
        self._messages.append(message)
        return Reply(message, node, generation.finish, request)

    def _append(self, ids: np.ndarray) -> None:
        """Add tokens that the policy did not draw."""
        node = self._record.add_node(self._leaf, self._agent, ids)
        self._path.append(node)
        self._grow(ids)

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
