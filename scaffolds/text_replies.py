"""What scaffolds share whose policies act by plain text: replies become calls, results become messages of a user.

Such a policy is given no tools by its chat format, so any chat format serves. The calls go to the environment as those
of native function calling do; they get their ids on the way (`ScaffoldContext.step`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from agentrl.protocols import ScaffoldContext
from agentrl.types.environment import Opening
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

_OPENING_FENCE = re.compile(r"[ \t]*(`{3,})[ \t]*([^`\s]*)[^`]*")


class ReplyFormat(Protocol):
    """How a policy writes what it does.

    `instructions` tell it so at the beginning, `advice` after a reply that is not of the format; `label` stands before
    every result.
    """

    @property
    def instructions(self) -> str:
        """The system message."""

    @property
    def advice(self) -> str:
        """The answer to a reply that cannot be read."""

    @property
    def label(self) -> str:
        """What a result begins with."""

    def read(self, reply: str) -> Message | None:
        """What a reply does, for the environment: a call, or an answer without one. None if it cannot be read."""


async def play_in_text(context: ScaffoldContext, opening: Opening, form: ReplyFormat) -> None:
    """Play an episode that has begun to its end; a reply that cannot be read is a turn, and the environment hears not
    of it.
    """
    reply = await context.generate(with_system(form.instructions, opening.messages))
    while True:
        action = None if reply.tool_calls else form.read(reply.content)
        if action is None:
            reply = await context.generate((Message(Role.USER, form.advice),))
            continue
        result = await context.step(action)
        if result.is_done:
            return
        reply = await context.generate(as_user(result.messages, form.label))


def with_system(text: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages behind a system message; one that they begin with becomes a part of it, as templates take only one."""
    own = [message.content for message in messages[:1] if message.role is Role.SYSTEM]
    return (Message(Role.SYSTEM, "\n\n".join([text, *own])), *messages[len(own) :])


def as_user(messages: Sequence[Message], label: str) -> tuple[Message, ...]:
    """Results of tools as messages of a user, behind a label; what a user says is left as it is."""
    return tuple(Message(Role.USER, label + m.content) if m.role is Role.TOOL else m for m in messages)


class TextTool(NamedTuple):
    """A tool that takes one text: its name, that of the argument, and what it says of itself."""

    name: str
    argument: str
    description: str


def choose_tool(tools: Sequence[ToolSpec], name: str | None) -> TextTool:
    """The tool of a name, or the only one that needs exactly one argument, a string.

    Example: of ``schema()`` and ``query(sql: string)`` it is the second.

    Raises:
        EpisodeError: there is none, or there are several (boundary scaffold, kind no_tool).
    """
    found = [TextTool(t.name, argument, t.description) for t in tools if (argument := _only_text(t)) is not None]
    chosen = [tool for tool in found if name in (None, tool.name)]
    if len(chosen) == 1:
        return chosen[0]
    there = ", ".join(tool.name for tool in found) or "none"
    wanted = "needs a tool with exactly one string argument" if name is None else f"finds no such tool '{name}'"
    raise EpisodeError(
        Boundary.SCAFFOLD,
        "no_tool",
        f"the scaffold {wanted}; of those with exactly one string argument the environment has: {there}. Set the "
        "scaffold's option 'tool' to one of them, or play this environment with tool_calling or react",
    )


@dataclass(frozen=True, slots=True)
class FencedBlocks:
    """A reply with one fenced block is a call of a tool with what is in it; one without is the answer.

    Of blocks, those count whose fence names one of `languages`, or any if there are none; the others are text.

    Example: ``Look first.\\n```bash\\nls -l\\n```\\n`` is a call of ``shell`` with ``ls -l``.
    """

    tool: TextTool
    languages: tuple[str, ...]
    instructions: str
    advice: str
    label: str = "Output:\n"

    def read(self, reply: str) -> Message | None:
        """The block's call, or the answer; None for several blocks, or one that is not closed."""
        blocks = find_blocks(reply)
        if blocks is None:
            return None
        acting = [text for language, text in blocks if not self.languages or language in self.languages]
        if len(acting) > 1:
            return None
        calls = tuple(ToolCall("", self.tool.name, {self.tool.argument: text}) for text in acting)
        return Message(Role.ASSISTANT, reply, calls)


def find_blocks(reply: str) -> list[tuple[str, str]] | None:
    """Language and text of each fenced block, in order; None if the last one is not closed.

    Fences stand on lines of their own. As in CommonMark a longer fence may hold shorter ones.
    """
    blocks: list[tuple[str, str]] = []
    fence, language, lines = "", "", list[str]()
    for line in reply.split("\n"):
        opens = _OPENING_FENCE.fullmatch(line)
        if not fence and opens is not None:
            fence, language, lines = opens[1], opens[2].casefold(), []
        elif fence and set(line.strip()) == {"`"} and len(line.strip()) >= len(fence):
            blocks.append((language, "\n".join(lines)))
            fence = ""
        elif fence:
            lines.append(line)
    return None if fence else blocks


def _only_text(tool: ToolSpec) -> str | None:
    """The one argument that a tool needs, if that is a string."""
    properties = tool.parameters.get("properties") or {}
    needed = tool.parameters.get("required") or list(properties)
    is_text = len(needed) == 1 and properties.get(needed[0], {}).get("type") == "string"
    return str(needed[0]) if is_text else None
