"""What a chat format can carry, found by trying it before a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentrl.types.errors import AgentRLError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

if TYPE_CHECKING:
    from agentrl.tokens.chat import ChatFormat

_PARAMETERS = {"type": "object", "properties": {"depth": {"type": "integer"}, "name": {"type": "string"}}}
_TOOLS = (ToolSpec("measure_depth", "Measures a depth.", _PARAMETERS),)
_SYSTEM = Message(Role.SYSTEM, "Answer in one word.")
_QUESTION = Message(Role.USER, "How deep is it?")
_CALL = Message(Role.ASSISTANT, "", (ToolCall("e/0.0", "measure_depth", {"depth": 3, "name": "lake"}),))
_RESULT = Message(Role.TOOL, "forty-one fathoms", tool_call_id="e/0.0")
_THOUGHT = Message(Role.ASSISTANT, "Deep.", reasoning="It must be deep.")
_NEXT = Message(Role.USER, "Are you sure?")
_REMINDER = Message(Role.SYSTEM, "Never guess.")
_ANOTHER_RENDERER = (
    "choose another chat.renderer: one of the renderers package, 'agentrl.tokens.chatml:ChatMLToolRenderer' for "
    "ChatML tokens, or 'module:Class' of your own"
)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a chat format carries without loss, tried on a probe conversation.

    `tools`: the prompt names them; `calls`: a call is written and read back; `results`: a tool's result
    stands in the conversation; `reasoning`: it is written and read back; `keeps_history`: the whole
    conversation, rendered anew, begins with what was said before; `later_system`: a system message that is not the
    first stands in the conversation.
    """

    system: bool
    later_system: bool
    tools: bool
    calls: bool
    results: bool
    reasoning: bool
    keeps_history: bool

    @property
    def has_tools(self) -> bool:
        """Whether calls and results stand in a conversation, whoever tells the policy of the tools."""
        return self.calls and self.results

    def limits(self) -> Iterator[str]:
        """What cannot be done and what to do about it, a sentence each."""
        if not self.system:
            yield "system messages are refused or left out; put instructions into the first user message"
        lost = {
            "tools do not appear in the prompt": not self.tools,
            "tool calls cannot be written or read back": not self.calls,
            "results of tools are refused or left out": not self.results,
        }
        if any(lost.values()):
            what = ", ".join(text for text, is_lost in lost.items() if is_lost)
            yield f"{what}; for environments with tools {_ANOTHER_RENDERER}"

    def notes(self) -> Iterator[str]:
        """What is good to know and stops no run, a sentence each."""
        if not self.reasoning:
            yield "reasoning is left out of replies; train without it, or choose a renderer that writes it"
        if not self.keeps_history:
            yield (
                "the template rewrites earlier replies (it drops their reasoning); they stay as sampled, unless "
                "chat.history = 'template'"
            )
        if not self.later_system:
            yield "a conversation with a system message that is not its first is refused: the format has none there"


def find_abilities(chat: ChatFormat) -> Abilities:
    """Try a chat format on conversations of its own."""
    return Abilities(
        system=_shows(chat, [_SYSTEM, _QUESTION], (), _SYSTEM.content),
        later_system=_shows(chat, [_SYSTEM, _QUESTION, _REMINDER, _THOUGHT, _NEXT], (), _REMINDER.content),
        tools=_shows(chat, [_QUESTION], _TOOLS, _TOOLS[0].name),
        calls=_reads_back(chat, _CALL),
        results=_takes_result(chat),
        reasoning=_reads_back(chat, _THOUGHT),
        keeps_history=_keeps_history(chat),
    )


def _shows(chat: ChatFormat, messages: list[Message], tools: tuple[ToolSpec, ...], text: str) -> bool:
    try:
        return text in chat.tokenizer.decode(chat.render(messages, tools).tolist())
    except AgentRLError:
        return False


def _reads_back(chat: ChatFormat, message: Message) -> bool:
    try:
        parsed = chat.parse(chat.complete(message), _TOOLS, "e/0.")
    except AgentRLError:
        return False
    return (parsed.content, parsed.tool_calls, parsed.reasoning) == (
        message.content,
        message.tool_calls,
        message.reasoning,
    )


def _takes_result(chat: ChatFormat) -> bool:
    try:
        opening = chat.render([_QUESTION], _TOOLS)
        piece = chat.extend(opening, chat.complete(_CALL), [_RESULT], _TOOLS, opening)
    except AgentRLError:
        return False
    return piece is not None and _RESULT.content in chat.tokenizer.decode(piece.tolist())


def _keeps_history(chat: ChatFormat) -> bool:
    try:
        opening = chat.render([_QUESTION], ())
        said = np.concatenate([opening, chat.complete(_THOUGHT)])
        whole = chat.render([_QUESTION, _THOUGHT, _NEXT], ())
    except AgentRLError:
        return True
    return chat.tokenizer.decode(whole.tolist()).startswith(chat.tokenizer.decode(said.tolist()))
