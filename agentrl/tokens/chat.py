"""A policy's chat format: messages to token ids and replies back to messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from renderers import Renderer

from agentrl.tokens.abilities import find_abilities
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.plain_forms import message_dicts, parsed_call_dicts, to_call, tool_dicts
from agentrl.tokens.quoting import Quoting
from agentrl.tokens.replies import reply_ids
from agentrl.tokens.selection import choose_renderer
from agentrl.tokens.template import TemplateRefusedError
from agentrl.tokens.template_renderer import TemplateRenderer
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

_log = logging.getLogger(__name__)
_PROBE_TOOLS = (ToolSpec("probe", "Probe."),)
_PROBE = (
    Message(Role.USER, "probe"),
    Message(Role.ASSISTANT, "", (ToolCall("call-0", "probe", {"x": 1}),)),
    Message(Role.TOOL, "probe", tool_call_id="call-0"),
)
_QUESTION = Message(Role.USER, "Go on.")
_PROMPT_END_TOKENS = 64
_UNQUOTED = Quoting(())


class ChatFormat:
    """Renders what a turn adds and parses what a policy replied; never touches tokens it did not make.

    `extend` costs what its new messages cost, not what the history costs: renderers look only at the
    end of the context, so they are given only the last prompt piece and reply. Whether that holds for
    a renderer is checked once, on a conversation of its own, when the format is built.

    The text of messages and tools is quoted on its way to the renderer, so that a control token which
    it spells stays text; control tokens come from the renderer alone.

    Example: ``open([user "hi"])`` gives the ids of the prompt up to where the reply begins.
    """

    def __init__(self, tokenizer: FastTokenizer, renderer: Renderer, source: str = "") -> None:
        self.tokenizer = tokenizer
        self._quoting = tokenizer.quoting
        self.source = source
        self._renderer = renderer
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        self._prompt_end = self.render([_QUESTION], ())[-_PROMPT_END_TOKENS:]
        self._needs_history = self._names_calls = True
        self.abilities = find_abilities(self)
        has_tail = isinstance(renderer, TemplateRenderer) or not self.abilities.has_tools
        self._needs_history = not has_tail and not self._extends_from_tail()
        self._names_calls = self.abilities.has_tools and self._results_name_calls()

    @classmethod
    def load(cls, model: Path, config: ChatConfig) -> ChatFormat:
        """The format of the model in a folder.

        Raises:
            ConfigError: there is none that fits, or the one that is asked for does not; says what to choose.
        """
        tokenizer = FastTokenizer.load(model)
        choice = choose_renderer(tokenizer, config, model)
        return cls(tokenizer, choice.renderer, choice.source)

    @classmethod
    def build(cls, tokenizer: FastTokenizer, config: ChatConfig) -> ChatFormat:
        """The format for a tokenizer without a folder. Raises ConfigError as `load` does."""
        choice = choose_renderer(tokenizer, config, None)
        return cls(tokenizer, choice.renderer, choice.source)

    def log_limits(self) -> None:
        """Say what the format cannot carry, before a run meets it."""
        for limit in self.abilities.limits():
            _log.warning("chat format of %s (%s): %s", self.tokenizer.name_or_path, self.source, limit)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> np.ndarray:
        """Ids of a whole conversation, up to where the next reply begins; [P] int32.

        Raises:
            ConfigError: there are tools, and the format cannot carry them.
            EpisodeError: the model's template refuses the conversation.
        """
        if tools and not self.abilities.has_tools:
            limits = "; ".join(self.abilities.limits())
            raise ConfigError(f"the chat format of {self.tokenizer.name_or_path} ({self.source}): {limits}")
        with self._refusals():
            if _has_system(messages[1:]) and not self.abilities.later_system:
                raise TemplateRefusedError("it has no place for a system message that is not the first")
        return self.render(messages, tools)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> np.ndarray:
        """As `open`, with tools even where the format leaves them out."""
        with self._refusals():
            ids = self._renderer.render_ids(
                message_dicts(messages, self._quoting),
                tools=tool_dicts(tools, self._quoting),
                add_generation_prompt=True,
            )
        return np.asarray(ids, np.int32)

    def extend(
        self,
        prompt_tail: np.ndarray,
        reply: np.ndarray,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        history: np.ndarray,
    ) -> np.ndarray | None:
        """Ids that new messages put behind the last reply, or None where the template rewrites history.

        `prompt_tail` is what was last added before the reply, `history` everything before the reply; a
        reply that was cut off gets the close that the format requires. None as well for a system message where the
        format has no place for it: to open the conversation anew says so.

        Raises:
            EpisodeError: the model's template refuses the messages.
        """
        if _has_system(messages) and not self.abilities.later_system:
            return None
        prompt = (history if self._needs_history else prompt_tail).tolist()
        with self._refusals():
            return self._bridge(prompt, reply.tolist(), messages, tools)

    def parse(
        self, reply: np.ndarray, tools: Sequence[ToolSpec], call_prefix: str, prompt_tail: np.ndarray | None = None
    ) -> Message:
        """The assistant message that reply ids spell; calls get the ids ``{call_prefix}{n}``.

        `prompt_tail` is what the reply stands behind, which may have opened its reasoning; without it the
        reply is read as one behind a user's message.
        """
        prompt = self._prompt_end if prompt_tail is None else prompt_tail[-_PROMPT_END_TOKENS:]
        parsed = self._renderer.parse_response(
            reply.tolist(), tools=tool_dicts(tools, _UNQUOTED), prompt_ids=prompt.tolist()
        )
        calls = tuple(to_call(call, f"{call_prefix}{n}") for n, call in enumerate(parsed.tool_calls))
        # What separates the parts of a reply are newlines; some renderers leave them in.
        reasoning = (parsed.reasoning_content or "").strip("\n") or None
        return Message(Role.ASSISTANT, parsed.content.strip("\n"), calls, reasoning=reasoning)

    def complete(self, message: Message) -> np.ndarray:
        """Ids with which a policy would have said `message`, its stop token included; [n] int32.

        Raises:
            ConfigError: the message reasons, but the format does not let a policy reason.
            EpisodeError: the model's template refuses the message.
        """
        with self._refusals():
            return np.asarray(reply_ids(self._renderer, self.tokenizer, message), np.int32)

    def _bridge(
        self, prompt: list[int], reply: list[int], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> np.ndarray | None:
        calls: list[Any] = []
        if self._names_calls and any(message.role is Role.TOOL for message in messages):
            end = prompt[-_PROMPT_END_TOKENS:]
            parsed = self._renderer.parse_response(reply, tools=tool_dicts(tools, _UNQUOTED), prompt_ids=end)
            calls = parsed_call_dicts(parsed.tool_calls)
        dicts = message_dicts(messages, self._quoting, calls)
        rendered = self._renderer.bridge_to_next_turn(prompt, reply, dicts, tools=tool_dicts(tools, self._quoting))
        before = len(prompt) + len(reply)
        if rendered is None or rendered.token_ids[:before] != prompt + reply:
            return None
        return np.asarray(rendered.token_ids[before:], np.int32)

    def _extends_from_tail(self) -> bool:
        """Whether a bridge from the last piece alone equals one from the whole history."""
        opening = self.open(_PROBE[:1], _PROBE_TOOLS).tolist()
        reply = self.complete(_PROBE[1]).tolist()
        piece = self._bridge(opening, reply, _PROBE[2:], _PROBE_TOOLS)
        if piece is None:
            return False
        from_history = self._bridge([*opening, *reply, *piece.tolist()], reply, _PROBE[2:], _PROBE_TOOLS)
        from_tail = self._bridge(piece.tolist(), reply, _PROBE[2:], _PROBE_TOOLS)
        return from_tail is not None and from_history is not None and bool(np.array_equal(from_tail, from_history))

    def _results_name_calls(self) -> bool:
        """Whether a tool's result is written with the name or the id of its call, which the reply then has to give."""
        opening, reply = self.open(_PROBE[:1], _PROBE_TOOLS).tolist(), self.complete(_PROBE[1]).tolist()
        bridges = [
            self._renderer.bridge_to_next_turn(
                opening,
                reply,
                message_dicts(_PROBE[2:], self._quoting, [{"id": f"functions.{name}:0", "function": {"name": name}}]),
                tools=tool_dicts(_PROBE_TOOLS, self._quoting),
            )
            for name in ("probe", "other")
        ]
        ids = [bridge.token_ids if bridge is not None else None for bridge in bridges]
        return ids[0] != ids[1]

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """A template may take one conversation and refuse another: that ends the episode, not the run."""
        try:
            yield
        except ConfigError:
            raise
        except (TemplateRefusedError, ValueError) as error:  # hand-written renderers refuse by a ValueError
            raise EpisodeError(
                Boundary.CONTRACT, "chat.template", f"{self.source} refuses the conversation: {error}"
            ) from error


def _has_system(messages: Sequence[Message]) -> bool:
    return any(message.role is Role.SYSTEM for message in messages)
