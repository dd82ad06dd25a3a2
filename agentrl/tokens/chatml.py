"""Tools for models whose chat template knows ChatML and nothing else: a renderer to declare for them.

Such models have no tokens for tools, so the Hermes markers ``<tool_call>`` and ``<tool_response>`` are
plain text here. A tool's output can spell them, but never a control token: it cannot end its own turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from renderers.base import (
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    Tokenizer,
    ToolCallParseStatus,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig

_TOOLS_HEADER = (
    "# Tools\n\nYou may call functions to answer. Their signatures are within <tools></tools> tags:\n<tools>\n"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nTo call a function, return a json object with its name and arguments within "
    "<tool_call></tool_call> tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class ChatMLToolConfig(BaseRendererConfig):
    """Options of `ChatMLToolRenderer`, as a chat configuration's ``options`` give them."""

    system: str = ""
    """System message of conversations that bring none; most ChatML models were trained with one."""

    _internal_fields = frozenset({"system"})


class ChatMLToolRenderer:
    """ChatML with tools in the system message, calls as text, and results as user turns.

    To be named in a chat configuration: ``renderer = "agentrl.tokens.chatml:ChatMLToolRenderer"``.

    Example: a call renders as ``<|im_start|>assistant\\n<tool_call>\\n{"name": "schema", "arguments":
    {}}\\n</tool_call><|im_end|>\\n``, of which the policy samples everything between the first and the
    last line break.
    """

    config_class = ChatMLToolConfig
    is_prefix_stable = True

    def __init__(self, tokenizer: Tokenizer, config: ChatMLToolConfig) -> None:
        self._tokenizer = tokenizer
        self._system = config.system
        start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        if start is None or end is None:
            raise ValueError("the tokenizer has no <|im_start|> and <|im_end|>; this is not a ChatML model")
        self._start, self._end = int(start), int(end)

    def render(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Token ids of a conversation, each with its message and whether a policy samples it."""
        rendered = RenderedTokens(message_roles=[message["role"] for message in messages])
        has_system = bool(messages) and messages[0]["role"] == "system"
        preamble = _preamble(messages[0]["content"] if has_system else self._system, tools)
        if preamble:
            self._add_turn(rendered, "system", preamble, 0 if has_system else -1)
        self._add_messages(rendered, messages, int(has_system))
        if add_generation_prompt:
            self._add_opening(rendered, "assistant", -1)
        return rendered

    def render_ids(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids of a conversation."""
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """A reply's text up to its first call, and every attempt at a call."""
        ids = token_ids[: token_ids.index(self._end)] if self._end in token_ids else token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        calls = [_parse_call(match[1].strip(), bool(match[2])) for match in _CALL.finditer(text)]
        return ParsedResponse(content=text.partition("<tool_call>")[0].strip(), tool_calls=calls)

    def get_stop_token_ids(self) -> list[int]:
        """The one token that ends a turn."""
        return [self._end]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Prompt and reply as they are, closed if cut off, then new messages up to the next reply."""
        if not new_messages or reject_assistant_in_extension(new_messages):
            return None
        previous = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, {self._end}, synthesize_close=self._end
        )
        rendered = RenderedTokens(message_roles=[message["role"] for message in new_messages])
        self._add(rendered, previous or [], -1)
        self._add(rendered, self._encode("\n"), -1)
        self._add_messages(rendered, new_messages, 0)
        self._add_opening(rendered, "assistant", -1)
        return rendered

    def _add_messages(self, rendered: RenderedTokens, messages: Sequence[Any], first: int) -> None:
        for index in range(first, len(messages)):
            message = messages[index]
            if message["role"] == "assistant":
                self._add_opening(rendered, "assistant", index)
                self._add(rendered, [*self._encode(_reply_text(message)), self._end], index, is_sampled=True)
                self._add(rendered, self._encode("\n"), index)
            elif message["role"] == "tool":
                self._add_tool_result(rendered, messages, index)
            else:
                self._add_turn(rendered, message["role"], message["content"], index)

    def _add_tool_result(self, rendered: RenderedTokens, messages: Sequence[Any], index: int) -> None:
        """Results that follow one another share a user turn."""
        roles = [message["role"] for message in messages]
        is_first, is_last = roles[index - 1 : index] != ["tool"], roles[index + 1 : index + 2] != ["tool"]
        if is_first:
            self._add_opening(rendered, "user", index)
        text = f"<tool_response>\n{messages[index]['content']}\n</tool_response>"
        self._add(rendered, self._encode(text if is_first else f"\n{text}"), index)
        if is_last:
            self._add(rendered, [self._end, *self._encode("\n")], index)

    def _add_turn(self, rendered: RenderedTokens, role: str, content: str, index: int) -> None:
        self._add_opening(rendered, role, index)
        self._add(rendered, [*self._encode(content), self._end, *self._encode("\n")], index)

    def _add_opening(self, rendered: RenderedTokens, role: str, index: int) -> None:
        self._add(rendered, [self._start, *self._encode(f"{role}\n")], index)

    def _add(self, rendered: RenderedTokens, ids: Sequence[int], index: int, is_sampled: bool = False) -> None:
        rendered.token_ids.extend(ids)
        rendered.message_indices.extend([index] * len(ids))
        rendered.sampled_mask.extend([is_sampled] * len(ids))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _preamble(system: str, tools: Sequence[Any] | None) -> str:
    if not tools:
        return system
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    block = f"{_TOOLS_HEADER}{signatures}{_TOOLS_FOOTER}"
    return f"{system}\n\n{block}" if system else block


def _reply_text(message: Mapping[str, Any]) -> str:
    return "\n".join(_reply_parts(message))


def _reply_parts(message: Mapping[str, Any]) -> Iterator[str]:
    if message["content"] or not message.get("tool_calls"):
        yield message["content"]
    for call in message.get("tool_calls") or ():
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        yield f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _parse_call(raw: str, is_closed: bool) -> ParsedToolCall:
    if not is_closed:
        return ParsedToolCall(raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw, name, value.get("arguments", {}))
