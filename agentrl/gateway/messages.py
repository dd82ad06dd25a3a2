"""Anthropic Messages: ``POST /v1/messages``, and ``/v1/messages/count_tokens`` for the length of a prompt alone.

The arguments of a call are an object here, so a call that did not parse stands in the text, as the policy wrote it.
Reasoning goes out as a thinking block without a signature, and is not read back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from anthropic.types import Message as AnthropicMessage
from anthropic.types import (
    MessageCountTokensParams,
    MessageParam,
    MessageTokensCount,
    TextBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from anthropic.types.message_create_params import MessageCreateParamsBase
from pydantic import TypeAdapter

from agentrl.gateway import rendering, shapes
from agentrl.gateway.dialects import ReadCall
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.program import CallRefusedError, ModelCall, ModelReply

_SETTINGS: shapes.Shape = TypeAdapter(MessageCreateParamsBase)
_COUNT_SETTINGS: shapes.Shape = TypeAdapter(MessageCountTokensParams)
_TOOL: shapes.Shape = TypeAdapter(ToolParam)
_MESSAGE: shapes.Shape = TypeAdapter(MessageParam)
_TEXT: shapes.Shape = TypeAdapter(TextBlockParam)
_CALL: shapes.Shape = TypeAdapter(ToolUseBlockParam)
_RESULT: shapes.Shape = TypeAdapter(ToolResultBlockParam)
# Claude Code begins its system prompt with a block for the vendor's accounting, which is another in every request.
_BILLING = "x-anthropic-billing-header:"
_THINKING = ("thinking", "redacted_thinking")
_TEXTS = {"text": "text"}
_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_READ = ("model", "max_tokens")
_IN_VAIN: dict[str, tuple[object, ...]] = {
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "stop_sequences": ([],),
    "tool_choice": ({"type": "auto"},),
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "output_format": (),
    "context_management": ({},),
    "mcp_servers": ([],),
    "container": (),
}
_KNOWN = frozenset(_READ) | frozenset(
    "messages system tools stream metadata cache_control service_tier speed inference_geo diagnostics".split()
)
_FINISH = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class MessagesDialect:
    """Reads and answers messages."""

    name = "messages"
    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    over_status = 403

    def read(self, body: bytes) -> ReadCall:
        """The call that a request's body asks for. Raises CallRefusedError."""
        request = shapes.read_object(body)
        shapes.check_settings(_SETTINGS, request, _READ, messages=[])
        call, without_effect = _read_call(request)
        overrides = (*shapes.in_vain(request, _IN_VAIN, _KNOWN), *without_effect)
        return ReadCall(call, shapes.flag(request, "stream"), overrides)

    def read_count(self, body: bytes) -> ModelCall:
        """The call whose prompt is to be counted. Raises CallRefusedError as `read` does."""
        request = shapes.read_object(body)
        shapes.check_settings(_COUNT_SETTINGS, request, ("model",), messages=[])
        return _read_call(request)[0]

    def count(self, prompt_tokens: int) -> dict[str, Any]:
        """The answer to a request for a count."""
        return MessageTokensCount(input_tokens=prompt_tokens).model_dump()

    def answer(self, read: ReadCall, reply: ModelReply, call_id: str) -> dict[str, Any]:
        """The whole message."""
        text, calls = rendering.visible(reply.message, _is_block)
        blocks: list[dict[str, Any]] = []
        if reply.message.reasoning is not None:
            blocks.append({"type": "thinking", "thinking": reply.message.reasoning, "signature": ""})
        if text:
            blocks.append({"type": "text", "text": text})
        blocks += ({"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in calls)
        message = {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "model": read.call.model,
            "content": blocks,
            "stop_reason": "tool_use" if calls and reply.finish is FinishReason.STOP else _FINISH[reply.finish],
            "stop_sequence": None,
            "usage": {
                # The whole prompt is the sum of what was read from the cache and what was not.
                "input_tokens": reply.prompt_tokens - reply.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": reply.cached_tokens,
                "output_tokens": len(reply.token_ids),
            },
        }
        return AnthropicMessage.model_validate(message).model_dump(mode="json", by_alias=True, exclude_unset=True)

    def events(self, read: ReadCall, reply: ModelReply, call_id: str) -> Iterator[str]:
        """The message block by block."""
        for data in _events(self.answer(read, reply, call_id)):
            yield rendering.server_event(data, data["type"])

    def keep_alive(self, call_id: str) -> str:
        """A ping."""
        return rendering.server_event({"type": "ping"}, "ping")

    def error(self, refusal: CallRefusedError) -> dict[str, Any]:
        """The body of an error."""
        kind = "api_error" if refusal.status >= 500 else "invalid_request_error"
        # Agents know by these words that they must shorten their conversation.
        prefix = "prompt is too long: " if refusal.kind == "context_length_exceeded" else ""
        error = {"type": _KINDS.get(refusal.status, kind), "message": f"{prefix}{refusal}"}
        return {"type": "error", "error": error}

    def error_event(self, refusal: CallRefusedError, call_id: str) -> str:
        """An event that is an error."""
        return rendering.server_event(self.error(refusal), "error")

    def echo(self, message: Message) -> Message:
        """The assistant message as it comes back."""
        text, calls = rendering.visible(message, _is_block)
        return Message(Role.ASSISTANT, text, calls)


def _is_block(call: ToolCall) -> bool:
    """Whether a call parsed, and its arguments are what JSON can carry."""
    return rendering.has_name(call) and call.error is None and rendering.returned_call(call).error is None


def _read_call(request: dict[str, Any]) -> tuple[ModelCall, list[str]]:
    """The call, and names of what has no effect."""
    tools, without_effect = _read_tools(request)
    messages = shapes.conversation(_read_conversation(request), "messages")
    return ModelCall(request["model"], messages, tools, shapes.token_bound(request, "max_tokens")), without_effect


def _read_tools(request: dict[str, Any]) -> tuple[tuple[ToolSpec, ...], list[str]]:
    """Functions, and names of what has no effect."""
    tools, in_vain = [], []
    for entry, place in shapes.objects(request.get("tools"), "tools"):
        tool = shapes.given(entry)
        if tool.get("type", "custom") != "custom":
            in_vain.append(f"tools.{tool['type']}")
            continue
        shapes.check(_TOOL, tool, place)
        tools.append(shapes.tool_spec(tool["name"], tool.get("description"), tool["input_schema"]))
        in_vain += ["tools.strict"] * bool(tool.get("strict"))
    return tuple(tools), list(dict.fromkeys(in_vain))


def _read_conversation(request: dict[str, Any]) -> Iterator[Message]:
    system = request.get("system")
    if isinstance(system, list):
        for block, place in shapes.objects(system, "system"):
            shapes.check(_TEXT, shapes.given(block), place)
        system = [block for block in system if not block["text"].startswith(_BILLING)]
    if system:
        yield Message(Role.SYSTEM, shapes.text_of(system, "system", _TEXTS, "\n\n"))
    for entry, place in shapes.objects(request.get("messages"), "messages"):
        shapes.one_of(_ROLES, entry.get("role"), f"{place}.role")
        if isinstance(entry.get("content"), list):
            # Each block is checked as what it says it is.
            shapes.check(_MESSAGE, entry | {"content": ""}, place)
            yield from _read_blocks(entry, place)
        else:
            shapes.check(_MESSAGE, entry, place)
            yield Message(_ROLES[entry["role"]], shapes.text_of(entry["content"], f"{place}.content", _TEXTS))


def _read_blocks(entry: dict[str, Any], place: str) -> Iterator[Message]:
    """The results among a message's blocks, and behind them one message of the others."""
    role = _ROLES[entry["role"]]
    texts: list[str] = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    for block, where in shapes.objects(entry["content"], f"{place}.content"):
        kind = block.get("type")
        if kind in _THINKING and role is Role.ASSISTANT:
            continue
        if kind == "tool_result" and role is Role.USER:
            results.append(_read_result(block, where))
        elif kind == "tool_use" and role is Role.ASSISTANT:
            shapes.check(_CALL, shapes.given(block), where)
            calls.append(ToolCall(block["id"], block["name"], block["input"]))
        elif kind == "text":
            shapes.check(_TEXT, shapes.given(block), where)
            texts.append(block["text"])
        else:
            raise shapes.refused_content(kind, where)
    yield from results
    if texts or not results:
        yield Message(role, "".join(texts), tuple(calls))


def _read_result(block: dict[str, Any], place: str) -> Message:
    text = shapes.text_of(block.get("content"), f"{place}.content", _TEXTS)
    shapes.check(_RESULT, shapes.given(block) | {"content": text}, place)
    return Message(Role.TOOL, text, tool_call_id=block["tool_use_id"])


def _events(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage = message["usage"]
    begun = {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": message | begun}
    for n, block in enumerate(message["content"]):
        yield from ({"index": n} | event for event in _block_events(block))
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _block_events(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind, field, value, empty = _streamed(block)
    yield {"type": "content_block_start", "content_block": block | empty}
    for piece in rendering.deltas(value):
        yield {"type": "content_block_delta", "delta": {"type": kind, field: piece}}
    yield {"type": "content_block_stop"}


def _streamed(block: dict[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    """Type and field of a block's deltas, what they spell, and the part of the block that is empty before them."""
    if block["type"] == "tool_use":
        return "input_json_delta", "partial_json", json.dumps(block["input"]), {"input": {}}
    field = "thinking" if block["type"] == "thinking" else "text"
    return f"{field}_delta", field, block[field], {field: ""}
