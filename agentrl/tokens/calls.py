"""Reads tool calls out of the text of a reply, in the formats that chat templates write them in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from renderers import ParsedToolCall, ToolCallParseStatus

Schemas = Mapping[str, Mapping[str, Any]]
"""Schema of each parameter, by tool and parameter."""

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([^\[\]{}\s]*)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way of writing calls; `read` gives what stands before them, and every attempt at a call.

    Example: ``HERMES.read('ok <tool_call>{"name": "look", "arguments": {}}</tool_call>', {})`` gives
    ``"ok "`` and one call of ``look``.
    """

    name: str
    read: Callable[[str, Schemas], tuple[str, list[ParsedToolCall]]]


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Schemas:
    """The parameters' schemas of tools in the form that templates get."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {f["name"]: dict(f.get("parameters", {}).get("properties", {})) for f in functions}


def _blocks(
    read_body: Callable[[str, Schemas], list[ParsedToolCall]],
) -> Callable[[str, Schemas], tuple[str, list[ParsedToolCall]]]:
    """Reads calls that stand in ``<tool_call>`` blocks."""

    def read(text: str, schemas: Schemas) -> tuple[str, list[ParsedToolCall]]:
        calls: list[ParsedToolCall] = []
        for block in _BLOCK.finditer(text):
            raw = block[1].strip()
            if block[2]:
                calls += read_body(raw, schemas)
            else:
                calls.append(ParsedToolCall(raw, status=ToolCallParseStatus.UNCLOSED_BLOCK))
        return text.partition("<tool_call>")[0], calls

    return read


def _json_body(raw: str, _schemas: Schemas) -> list[ParsedToolCall]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return [ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON)]
    return [_named(raw, entry) for entry in (value if isinstance(value, list) else [value])]


def _named(raw: str, value: object) -> ParsedToolCall:
    fields = value if isinstance(value, dict) else {}
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw, status=ToolCallParseStatus.MISSING_NAME)
    own_id = fields.get("id")
    arguments = fields.get("arguments", fields.get("parameters", {}))
    return ParsedToolCall(raw, name, arguments, id=own_id if isinstance(own_id, str) else None)


def _function_body(raw: str, schemas: Schemas) -> list[ParsedToolCall]:
    function = _FUNCTION.match(raw)
    if function is None or not function[1].strip():
        return [ParsedToolCall(raw, status=ToolCallParseStatus.MISSING_NAME)]
    if not function[3]:
        return [ParsedToolCall(raw, function[1].strip(), status=ToolCallParseStatus.MALFORMED_STRUCTURE)]
    name = function[1].strip()
    return [ParsedToolCall(raw, name, _arguments(name, _PARAMETER.findall(function[2]), schemas))]


def _keyed_body(raw: str, schemas: Schemas) -> list[ParsedToolCall]:
    name = raw.partition("<arg_key>")[0].strip()
    if not name:
        return [ParsedToolCall(raw, status=ToolCallParseStatus.MISSING_NAME)]
    pairs = _ARGUMENT.findall(raw)
    if len(pairs) != raw.count("<arg_key>"):
        return [ParsedToolCall(raw, name, status=ToolCallParseStatus.MALFORMED_STRUCTURE)]
    return [ParsedToolCall(raw, name, _arguments(name, pairs, schemas))]


def _arguments(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> dict[str, Any]:
    """Values written without quotes: text where the schema says so, else JSON if it is any."""
    schema = schemas.get(name, {})
    return {key.strip(): _value(text, schema.get(key.strip(), {})) for key, text in pairs}


def _value(text: str, schema: object) -> object:
    if isinstance(schema, Mapping) and schema.get("type") in ("string", ["string"]):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_mistral(text: str, _schemas: Schemas) -> tuple[str, list[ParsedToolCall]]:
    """A JSON list behind one marker, or a marker, a name and JSON for each call."""
    before, *parts = text.split(_MISTRAL)
    calls: list[ParsedToolCall] = []
    for part in parts:
        head = _MISTRAL_CALL.match(part)
        if head is None or not head[1]:
            calls += _json_body(part.strip(), {})
            continue
        try:
            calls.append(ParsedToolCall(part, head[1], json.loads(part[head.end() :])))
        except (ValueError, RecursionError):
            calls.append(ParsedToolCall(part, head[1], status=ToolCallParseStatus.INVALID_JSON))
    return before, calls


def _read_bare_json(text: str, _schemas: Schemas) -> tuple[str, list[ParsedToolCall]]:
    """A reply that is nothing but a call, as Llama 3 has it; only behind its marker can a call be malformed."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    calls = _json_body(body, {}) if body.startswith("{") else []
    is_marked = text.lstrip().startswith(_PYTHON_TAG)
    if is_marked and not calls:
        return "", [ParsedToolCall(body, status=ToolCallParseStatus.INVALID_JSON)]
    is_call = bool(calls) and (is_marked or calls[0].status == ToolCallParseStatus.OK)
    return ("", calls) if is_call else (text, [])


HERMES = CallFormat("JSON in <tool_call> tags", _blocks(_json_body))
FUNCTION_TAGS = CallFormat("<function=...> in <tool_call> tags", _blocks(_function_body))
KEYED = CallFormat("<arg_key> and <arg_value> in <tool_call> tags", _blocks(_keyed_body))
MISTRAL = CallFormat("[TOOL_CALLS]", _read_mistral)
BARE_JSON = CallFormat("a reply that is a JSON object", _read_bare_json)
CALL_FORMATS = (HERMES, FUNCTION_TAGS, KEYED, MISTRAL, BARE_JSON)
