"""Messages and tools: what scaffolds and environments speak; text never travels further down."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the policy wrote it.

    `error` is None for a call that parsed. Otherwise it says what was wrong (``invalid_json``,
    ``missing_name``, ``arguments_number_too_large``), `arguments` is empty and `raw` holds the text.

    Example: ``ToolCall("call-0", "query", {"sql": "SELECT 1"})``.
    """

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Example: ``Message(Role.TOOL, "93", tool_call_id="call-0")`` answers the call ``call-0``.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the policy is told of it; `parameters` is a JSON Schema of the arguments."""

    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
