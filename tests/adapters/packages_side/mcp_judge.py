"""A judge of a user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.types.environment import Score
from agentrl.types.message import Message


def judge(row: Mapping[str, Any], answer: str | None, messages: Sequence[Message]) -> Score:
    """Half for the call, half for the answer."""
    called = any(
        call.arguments == dict(zip("ab", row["parts"], strict=True)) for m in messages for call in m.tool_calls
    )
    return Score(0.5 * called + 0.5 * (answer == str(sum(row["parts"]))), {"said": float(len(messages))})
