"""ReAct: the policy writes a thought, an action and its input as text, and reads an observation (arXiv 2210.03629)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl_scaffolds.text_replies import play_in_text

_PROMPT = """You do a task step by step. To use a tool, reply with:
Thought: what you think
Action: the name of the tool
Action Input: its arguments as a JSON object
You then read an observation. To answer, reply with:
Thought: what you think
Final Answer: your answer"""
_ADVICE = (
    "Nothing was done. End your reply with 'Action: the name of a tool' and, on a line below it, 'Action Input: a JSON "
    "object', or with 'Final Answer: your answer'."
)
_STEP = re.compile(r"^[ \t]*(Action|Final Answer):", re.MULTILINE)
_INPUT = re.compile(r"^[ \t]*Action Input:", re.MULTILINE)


class React(Scaffold):
    """Reads tool calls and the final answer from the text of replies, for policies whose chat format has no tools.

    The first action or final answer of a reply counts; what stands behind it, such as an observation that the policy
    made up, does not. The environment's tools follow the system prompt; `system_prompt` stands in place of the one that
    tells the format. A reply without either, of a tool that is not there, or whose input is no JSON object is told the
    format.

    Example, in the environment ``sql``: opening "What is the largest net cost?" -> reply "Thought: I ask the table.
    \\nAction: query\\nAction Input: {"sql": "SELECT MAX(net_cost) FROM east_stock"}" -> call ``query`` -> user
    "Observation: 93" -> reply "Final Answer: 93", of which the environment is given ``93``.
    """

    def __init__(self, system_prompt: str = _PROMPT) -> None:
        self._prompt = system_prompt

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        tools = frozenset(tool.name for tool in opening.tools)
        await play_in_text(context, opening, _Steps(tools, f"{self._prompt}\n\n{_listed(opening.tools)}"))


@dataclass(frozen=True, slots=True)
class _Steps:
    """Thoughts, actions and observations as text."""

    tools: frozenset[str]
    instructions: str
    advice: str = _ADVICE
    label: str = "Observation: "

    def read(self, reply: str) -> Message | None:
        """The first action of a reply, or its answer."""
        found = _STEP.search(reply)
        if found is None:
            return None
        rest = reply[found.end() :]
        if found[1] == "Final Answer":
            return Message(Role.ASSISTANT, rest.strip())
        given = _INPUT.search(rest)
        if given is None:
            return None
        name, arguments = rest[: given.start()].strip(), _object_in(rest[given.end() :])
        if name not in self.tools or arguments is None:
            return None
        return Message(Role.ASSISTANT, reply, (ToolCall("", name, arguments),))


def _object_in(text: str) -> dict[str, Any] | None:
    """The JSON object that a text begins with; None if it begins with anything else."""
    try:
        value, _ = json.JSONDecoder(parse_constant=_refuse).raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(name: str) -> NoReturn:
    """NaN and infinities are no JSON, though Python reads them."""
    raise ValueError(name)


def _listed(tools: Sequence[ToolSpec]) -> str:
    """The tools as lines of text."""
    if not tools:
        return "There are no tools."
    lines = [f"{tool.name}: {tool.description} Arguments: {json.dumps(tool.parameters)}" for tool in tools]
    return "\n".join(["Tools:", *lines])
