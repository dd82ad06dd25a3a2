"""Messages and tools in the plain form that chat templates take, their text quoted; and calls as they come back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from renderers import ParsedToolCall

from agentrl.tokens.quoting import Quoting
from agentrl.types.message import Message, ToolCall, ToolSpec


def message_dicts(messages: Sequence[Message], quoting: Quoting, earlier: Sequence[Any] = ()) -> list[Any]:
    """Messages as templates take them; `earlier` are calls in this form that results may answer.

    Calls are numbered through the conversation and named as Kimi's templates want it, which write the name
    of a call nowhere else; our own ids name an episode, which no prompt may.

    Example: the first call of a conversation, of ``query``, gets the id ``functions.query:0``.
    """
    number = itertools.count()
    calls = [[_call_dict(call, quoting, next(number)) for call in message.tool_calls] for message in messages]
    answered = {
        call.id: entry
        for message, entries in zip(messages, calls, strict=True)
        for call, entry in zip(message.tool_calls, entries, strict=True)
    }
    others = [message.tool_call_id for message in messages if message.tool_call_id not in answered]
    answered |= dict(zip(filter(None, others), earlier, strict=False))
    return [_message_dict(m, quoting, entries, answered) for m, entries in zip(messages, calls, strict=True)]


def parsed_call_dicts(parsed: Sequence[ParsedToolCall]) -> list[Any]:
    """The calls of a reply in this form, under the ids that the policy itself wrote, if it did."""
    return [
        {
            "id": call.id if call.id and _fault_of(call.id) is None else f"functions.{_name(call)}:{n}",
            "function": {"name": _name(call)},
        }
        for n, call in enumerate(parsed)
    ]


def tool_dicts(tools: Sequence[ToolSpec], quoting: Quoting) -> list[Any] | None:
    """Tools as official templates get them; None if there are none.

    Example: ``[{"type": "function", "function": {"name": "query", "description": "Run SQL.", "parameters": {}}}]``.
    """
    functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools]
    return [{"type": "function", "function": quoting.quote_all(function)} for function in functions] or None


def to_call(parsed: ParsedToolCall, call_id: str) -> ToolCall:
    """A call as a renderer read it, under our own id."""
    name = _name(parsed)
    if parsed.status != "ok":
        return ToolCall(call_id, name, {}, str(parsed.status), parsed.raw)
    if (fault := _fault_of(parsed.arguments)) is not None:
        return ToolCall(call_id, name, {}, fault, parsed.raw)
    if name and isinstance(parsed.arguments, dict):
        return ToolCall(call_id, name, parsed.arguments)
    return ToolCall(call_id, name, {}, "arguments_not_an_object" if name else "missing_name", parsed.raw)


def _name(parsed: ParsedToolCall) -> str:
    # Renderers pass on whatever a policy wrote where the name belongs, an object or a number too.
    return parsed.name if isinstance(parsed.name, str) and _fault_of(parsed.name) is None else ""


def _fault_of(value: object) -> str | None:
    """Why a journal could not hold a JSON value that a policy wrote: ``"\\ud800"`` is read as half a character."""
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        return "arguments_no_unicode"
    except OverflowError:
        return "arguments_number_too_large"
    return None


def _message_dict(message: Message, quoting: Quoting, calls: list[Any], answered: Mapping[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": str(message.role), "content": quoting.quote(message.content)}
    if calls:
        entry["tool_calls"] = calls
    call = answered.get(message.tool_call_id or "")
    if call is not None:
        entry |= {"tool_call_id": quoting.quote(call["id"]), "name": quoting.quote(call["function"]["name"])}
    elif message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        entry["reasoning_content"] = quoting.quote(message.reasoning)
    return entry


def _call_dict(call: ToolCall, quoting: Quoting, number: int) -> dict[str, Any]:
    name = quoting.quote(call.name)
    function = {"name": name, "arguments": quoting.quote_all(call.arguments)}
    return {"type": "function", "id": f"functions.{name}:{number}", "function": function}
