"""What every dialect does to a reply: calls as text and back, deltas, server-sent events, errors of OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from pydantic_core import from_json

from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.program import CallRefusedError

_MOST_DELTAS = 4


class OpenAIStyle:
    """What the dialects of OpenAI's form have in common: errors, and streams that clients keep open for comments."""

    def keep_alive(self, call_id: str) -> str:
        """A comment."""
        return ": keep-alive\n\n"

    def error(self, refusal: CallRefusedError) -> dict[str, Any]:
        """An error as OpenAI's routes answer it: a broad type by status, and the kind as its code."""
        kinds = {429: "rate_limit_error"}
        kind = kinds.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
        code = None if refusal.kind == kind else refusal.kind
        return {"error": {"message": str(refusal), "type": kind, "param": refusal.parameter or None, "code": code}}

    def error_event(self, refusal: CallRefusedError, call_id: str) -> str:
        """An event that is an error."""
        return server_event(self.error(refusal))


def arguments_text(call: ToolCall) -> str:
    """What a program gets as the arguments of a call: JSON, or the policy's own text where that did not parse."""
    return json.dumps(call.arguments) if call.error is None else call.raw


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """A call as a program sends it back.

    Example: arguments ``{"sql": `` give a call with error ``invalid_json`` and that text as `raw`.
    """
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return ToolCall(call_id, name, {}, "invalid_json", arguments)
    if not isinstance(value, dict):
        return ToolCall(call_id, name, {}, "arguments_not_an_object", arguments)
    return ToolCall(call_id, name, value)


def returned_call(call: ToolCall) -> ToolCall:
    """The call as it comes back from a program that got its arguments as text."""
    return read_call(call.id, call.name, arguments_text(call))


def has_name(call: ToolCall) -> bool:
    """Whether a program can be told of a call where arguments are text."""
    return bool(call.name) and call.name.isprintable()


def visible(message: Message, is_call: Callable[[ToolCall], bool]) -> tuple[str, tuple[ToolCall, ...]]:
    """The text and the calls that a program sees; what the dialect has no form for as a call stands in the text."""
    calls = tuple(call for call in message.tool_calls if is_call(call))
    others = [arguments_text(call) for call in message.tool_calls if not is_call(call)]
    return "\n\n".join(text for text in (message.content, *others) if text), calls


def echo_with_text_arguments(message: Message) -> Message:
    """`Dialect.echo` where the arguments of calls are text."""
    text, calls = visible(message, has_name)
    return Message(Role.ASSISTANT, text, tuple(returned_call(call) for call in calls))


def deltas(text: str) -> Iterator[str]:
    """The text in a few pieces of one size; none of an empty one."""
    size = -(-len(text) // _MOST_DELTAS)
    return (text[start : start + size] for start in range(0, len(text), size or 1))


def server_event(data: dict[str, Any], name: str | None = None) -> str:
    """One server-sent event; in ASCII, because some clients end lines at what Unicode says ends one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n"
