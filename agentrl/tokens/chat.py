"""A policy's chat format: messages to token ids and replies back to messages, through `renderers`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from renderers import Renderer, RendererConfig, create_renderer

from agentrl.tokens.config import ChatConfig
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

_log = logging.getLogger(__name__)
_PROBE_TOOLS = (ToolSpec("probe", "Probe."),)
_PROBE = (
    Message(Role.USER, "probe"),
    Message(Role.ASSISTANT, "", (ToolCall("call-0", "probe", {"x": 1}),)),
    Message(Role.TOOL, "probe", tool_call_id="call-0"),
)


class ChatFormat:
    """Renders what a turn adds and parses what a policy replied; never touches tokens it did not make.

    `extend` costs what its new messages cost, not what the history costs: renderers look only at the
    end of the context, so they are given only the last prompt piece and reply. Whether that holds for
    a renderer is checked once, on a conversation of its own, when the format is built.

    Example: ``open([user "hi"])`` gives the ids of the prompt up to where the reply begins.
    """

    def __init__(self, tokenizer: FastTokenizer, renderer: Renderer) -> None:
        self.tokenizer = tokenizer
        self._renderer = renderer
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        tokenizer.splits_control_tokens = False
        as_template = self._renderer.render_ids(_to_dicts(_PROBE), tools=_tool_dicts(_PROBE_TOOLS))
        tokenizer.splits_control_tokens = True
        if self._renderer.render_ids(_to_dicts(_PROBE), tools=_tool_dicts(_PROBE_TOOLS)) != as_template:
            _log.warning(
                "renderer of %s spells control tokens as text; tool output can forge them", tokenizer.name_or_path
            )
            tokenizer.splits_control_tokens = False
        self._needs_history = not self._extends_from_tail()

    @classmethod
    def load(cls, model: Path, config: ChatConfig) -> ChatFormat:
        """The format of the model in a folder. Raises ConfigError."""
        return cls.build(FastTokenizer.load(model), config)

    @classmethod
    def build(cls, tokenizer: FastTokenizer, config: ChatConfig) -> ChatFormat:
        """The format for a tokenizer. Raises ConfigError if the renderer or its options are unknown."""
        try:
            renderer = create_renderer(tokenizer, _renderer_config(config))
        except (ValueError, TypeError, ImportError, AssertionError, OSError) as error:
            raise ConfigError(
                f"chat.renderer '{config.renderer}' does not fit {tokenizer.name_or_path}: {error}"
            ) from error
        return cls(tokenizer, renderer)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> np.ndarray:
        """Ids of a whole conversation, up to where the next reply begins; [P] int32."""
        ids = self._renderer.render_ids(_to_dicts(messages), tools=_tool_dicts(tools), add_generation_prompt=True)
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
        reply that was cut off gets the close that the format requires.
        """
        prompt = (history if self._needs_history else prompt_tail).tolist()
        return self._bridge(prompt, reply.tolist(), messages, tools)

    def parse(self, reply: np.ndarray, tools: Sequence[ToolSpec], call_prefix: str) -> Message:
        """The assistant message that reply ids spell; calls get the ids ``{call_prefix}{n}``."""
        parsed = self._renderer.parse_response(reply.tolist(), tools=_tool_dicts(tools))
        calls = tuple(_to_call(call, f"{call_prefix}{n}") for n, call in enumerate(parsed.tool_calls))
        return Message(Role.ASSISTANT, parsed.content, calls, reasoning=parsed.reasoning_content)

    def complete(self, message: Message) -> np.ndarray:
        """Ids with which a policy would have said `message`, its stop token included; [n] int32."""
        user = Message(Role.USER, "")
        # Templates drop the reasoning of replies before a user's message, but not before a tool's.
        behind = user if message.reasoning is None else Message(Role.TOOL, "", tool_call_id="call-0")
        rendered = self._renderer.render(_to_dicts([user, message, behind]))
        entries = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        return np.asarray([token for token, owner, is_sampled in entries if owner == 1 and is_sampled], np.int32)

    def _bridge(
        self, prompt: list[int], reply: list[int], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> np.ndarray | None:
        rendered = self._renderer.bridge_to_next_turn(prompt, reply, _to_dicts(messages), tools=_tool_dicts(tools))
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


def _renderer_config(config: ChatConfig) -> Any:
    options = dict(config.options)
    if config.history == "exact":
        options.setdefault("thinking_retention", "all")
    name = config.renderer
    if ":" in name:
        name, options["import_path"] = "custom", name.replace(":", ".")
    return TypeAdapter(RendererConfig).validate_python({"name": name, **options})


def _to_call(parsed: Any, call_id: str) -> ToolCall:
    is_call = parsed.status == "ok" and isinstance(parsed.arguments, dict)
    if is_call:
        return ToolCall(call_id, parsed.name, parsed.arguments)
    error = str(parsed.status) if parsed.status != "ok" else "arguments_not_an_object"
    return ToolCall(call_id, parsed.name or "", {}, error, parsed.raw)


def _to_dicts(messages: Sequence[Message]) -> list[Any]:
    return [_to_dict(message) for message in messages]


def _to_dict(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    return entry


def _tool_dicts(tools: Sequence[ToolSpec]) -> list[Any] | None:
    return [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools] or None
