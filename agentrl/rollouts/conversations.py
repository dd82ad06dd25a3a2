"""The conversations of a program: it keeps them itself and sends them whole, several at once if it likes.

Each call is put where it belongs in the graph of the episode. A conversation that goes on behind a reply of ours is
known *by its messages* and extends the context of that reply: what parsing the reply and rendering it again would
lose opens no branch, nor do the calls of one reply that come back one by one, each before its result. Any other is
rendered, and goes on behind the longest path of nodes that its tokens begin with; what shares nothing begins a root.
So a history that was summarised or edited, and a sub-agent, are branches.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.rollouts.episode_log import EpisodeLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.recorded_replies import request_digest
from agentrl.rollouts.replies import Drawn, Prompt, ReplySampler
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Node, SampledColumns
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.program import ModelCall, ModelReply

Echo = Callable[[Message], Message]
"""How a reply comes back when a program sends it again in its own dialect."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a call goes on: nodes from a root on, what comes behind them, and all tokens together."""

    path: tuple[Node, ...]
    new_ids: np.ndarray  # [m] int32
    token_ids: np.ndarray  # [P] int32

    @property
    def leaf(self) -> int | None:
        """The node that the call goes on behind; None at the root."""
        return self.path[-1].index if self.path else None

    @property
    def last_reply(self) -> int | None:
        """The last node of the path that the policy drew."""
        return next((node.index for node in reversed(self.path) if node.sample is not None), None)


class Conversations:
    """What one agent was asked and said, as a program asked it.

    Example: a program sends ``[user]`` and gets reply a, then sends ``[user, a, tool]``: the reply to that extends the
    branch of a. Then it sends ``[other user]``: that is a branch of its own.
    """

    def __init__(
        self, record: EpisodeRecord, agent: str, chat: ChatFormat, sampler: ReplySampler, log: EpisodeLog
    ) -> None:
        self._record, self._agent = record, agent
        self._chat, self._sampler, self._log = chat, sampler, log
        self._known: dict[bytes, tuple[Node, ...]] = {}
        self._reply_of_call: dict[str, int] = {}
        self._children: defaultdict[int | None, list[Node]] = defaultdict(list)
        self._branches: dict[int | None, int] = {}
        self._begun: Counter[int | None] = Counter()
        self._num_branches = self._num_calls = 0

    async def reply(self, call: ModelCall, echo: Echo) -> ModelReply:
        """Let the policy reply; durable before the program hears of it.

        Waits for: the engine, then the journal. Unblocked by: these, or an error.

        Raises:
            ContextFullError: no room for a reply.
            TokensSpentError: no token is left to the agent.
            ConfigError: there are tools, and the chat format cannot carry them.
            EpisodeError: the model's template refuses the conversation, or the engine failed.
        """
        call = replace(call, messages=self._with_whole_replies(call.messages))
        keys = _running_keys(call.tools, call.messages)
        place = self._place(call, keys)
        self._num_calls += 1
        request = f"{request_digest(place.token_ids)}.{self._num_calls}"
        branch = self._branch_from(place.last_reply)
        prompt = Prompt(place.token_ids, place.new_ids, place.leaf, branch, call.messages, request, call.max_tokens)
        drawn = await self._sampler.draw(prompt)
        path = self._add(place, drawn, branch)
        turn = self._record.last_turn
        await self._log.turned(turn, self._record.uncommitted(self._agent), drawn.generation.finish, request)
        message = self._chat.parse(path[-1].token_ids, call.tools, f"call_{turn.index}_", path[-2].token_ids)
        if call.prompt_ids is None:
            echoed = echo(message)
            self._known[_next_key(keys[-1], echoed)] = path
            self._reply_of_call.update((made.id, turn.index) for made in echoed.tool_calls)
        await self._log.synced()
        return self._as_reply(message, place, drawn, call.wants_pieces)

    def prompt_tokens(self, call: ModelCall) -> int:
        """How long the prompt of a call would be. Raises ConfigError and EpisodeError as `reply` does."""
        messages = self._with_whole_replies(call.messages)
        place = self._place(replace(call, messages=messages), _running_keys(call.tools, messages))
        return len(place.token_ids)

    def _with_whole_replies(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages; a reply that comes back in parts, with results between its calls, is one of them."""
        whole: list[Message] = []
        asking = 0
        for message in messages:
            if asking < len(whole) and self._are_of_one_reply(whole[asking], message):
                whole[asking] = _joined(whole[asking], message)
                continue
            if message.role is not Role.TOOL:
                asking = len(whole)
            whole.append(message)
        return tuple(whole)

    def _are_of_one_reply(self, *parts: Message) -> bool:
        replies = {self._reply_of_call.get(part.tool_calls[0].id) if part.tool_calls else None for part in parts}
        return len(replies) == 1 and None not in replies

    def _place(self, call: ModelCall, keys: Sequence[bytes]) -> _Place:
        if call.prompt_ids is not None:
            return self._by_tokens(call.prompt_ids)
        for num_known in range(len(call.messages), 0, -1):
            path = self._known.get(keys[num_known])
            extended = self._extended(path, call.messages[num_known:], call.tools) if path else None
            if extended is not None:
                return extended
        return self._by_tokens(self._chat.open(call.messages, call.tools))

    def _extended(
        self, path: tuple[Node, ...], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> _Place | None:
        """The place behind a known reply; None where another reply has come in between, or the template rewrites."""
        if not messages or any(message.role is Role.ASSISTANT for message in messages):
            return None
        context = np.concatenate([node.token_ids for node in path])
        reply = path[-1].token_ids
        history = context[: len(context) - len(reply)]
        piece = self._chat.extend(path[-2].token_ids, reply, messages, tools, history)
        return None if piece is None else _Place(path, piece, np.concatenate([context, piece]))

    def _by_tokens(self, token_ids: np.ndarray) -> _Place:
        """The place behind the longest path that the tokens begin with."""
        best: tuple[Node, ...] = ()
        reached = 0
        candidates: list[tuple[tuple[Node, ...], int]] = [((), 0)]
        while candidates:
            path, length = candidates.pop()
            if length > reached:
                best, reached = path, length
            for node in self._children[path[-1].index if path else None]:
                end = length + len(node.token_ids)
                if end <= len(token_ids) and np.array_equal(token_ids[length:end], node.token_ids):
                    candidates.append(((*path, node), end))
        return _Place(best, token_ids[reached:], token_ids)

    def _branch_from(self, last_reply: int | None) -> int:
        """The branch of what comes behind a reply: the reply's own for the first, else one with its own chance."""
        self._begun[last_reply] += 1
        if last_reply is not None and self._begun[last_reply] == 1:
            return self._branches[last_reply]
        self._num_branches += 1
        return self._num_branches - 1

    def _add(self, place: _Place, drawn: Drawn, branch: int) -> tuple[Node, ...]:
        """Put prompt and reply on record; a prompt that is there already, from a call like it, is not added."""
        path = place.path
        if len(place.new_ids):
            path = (*path, self._prompt_node(place.leaf, place.new_ids))
        leaf, generation = path[-1].index if path else None, drawn.generation
        sample = SampledColumns.of(generation)
        reply = self._record.add_node(leaf, self._agent, generation.token_ids, sample)
        self._children[leaf].append(reply)
        self._branches[reply.index] = branch
        self._record.add_turn(self._agent, reply, drawn.seconds, drawn.aborts, generation.regenerated_tokens)
        return (*path, reply)

    def _prompt_node(self, parent: int | None, token_ids: np.ndarray) -> Node:
        for node in self._children[parent]:
            if node.sample is None and np.array_equal(node.token_ids, token_ids):
                return node
        node = self._record.add_node(parent, self._agent, token_ids)
        self._children[parent].append(node)
        return node

    def _as_reply(self, message: Message, place: _Place, drawn: Drawn, with_pieces: bool) -> ModelReply:
        generation = drawn.generation
        ids = generation.token_ids
        pieces = tuple(self._chat.tokenizer.decode([token]) for token in ids.tolist()) if with_pieces else ()
        return ModelReply(
            message,
            generation.finish,
            len(place.token_ids),
            ids,
            generation.logprobs,
            pieces,
            generation.cached_tokens,
        )


def _joined(first: Message, second: Message) -> Message:
    return replace(first, content=first.content + second.content, tool_calls=first.tool_calls + second.tool_calls)


def _running_keys(tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[bytes]:
    """A key of every beginning of a conversation with its tools, the empty one first."""
    offered = [[tool.name, tool.description, tool.parameters] for tool in tools]
    keys = [_digest(b"", offered)]
    for message in messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    # Programs send replies back without what they have no place for, and with other white space around them.
    is_reply = message.role is Role.ASSISTANT
    content = message.content.strip() if is_reply else message.content
    calls = [_call_form(call) for call in message.tool_calls]
    return _digest(key, [message.role.value, content, calls, message.tool_call_id])


def _call_form(call: ToolCall) -> list[object]:
    return [call.id, call.name, call.arguments, call.raw if call.error is not None else ""]


def _digest(before: bytes, value: object) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
