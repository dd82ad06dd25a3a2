"""Scripted policies that make each agent do a task by its own tools: they go by the conversation alone.

A task reads ``Write 'text' into name.txt``. One that asks for several files has each written by a sub-agent.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence

from agentrl.testing.scripted import Script
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.sandbox import WORKSPACE

SHARING = "I share it out."
_SUB_AGENTS = "multi_agent_v1"  # codex has these tools in a namespace
_TASK = re.compile(r"Write '([^']*)' into ([\w.-]+)")
_Act = tuple[str, dict[str, object]]
_Shell = Callable[[str], _Act]


def task(files: Sequence[tuple[str, str]]) -> str:
    """Asks for files by text and name."""
    return "; ".join(f"Write '{text}' into {name}" for text, name in files)


def _files(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [found for m in messages if m.role is Role.USER for found in _TASK.findall(m.content)]


def _saying(content: str, *acts: _Act) -> Message:
    return Message(Role.ASSISTANT, content, tuple(ToolCall(f"call_{i}", *act) for i, act in enumerate(acts)))


def _next(messages: Sequence[Message], replies: Sequence[Message]) -> Message:
    """The first reply whose calls have not been made yet, with ids of its own for them."""
    made = sum(len(message.tool_calls) for message in messages)
    left = made
    for reply in replies:
        if left < len(reply.tool_calls) or not reply.tool_calls:
            calls = (ToolCall(f"call_{made + i}", c.name, c.arguments) for i, c in enumerate(reply.tool_calls))
            return Message(Role.ASSISTANT, reply.content, tuple(calls))
        left -= len(reply.tool_calls)
    raise ValueError(f"an agent goes on behind the end of its task, after {made} calls of tools")


def _written(text: str, name: str, shell: _Shell, write: _Act) -> list[Message]:
    """How one file is written and looked at; two calls at once, and texts that begin and end with space."""
    return [
        _saying("  I look first.\n\n", shell("ls -la")),
        _saying("", write),
        _saying("Now I check it: 'quoted', \"twice\", é.\n", shell(f"cat {name}"), shell(f"wc -c {name}")),
    ]


def mini_swe_agent(session: str, messages: Sequence[Message]) -> Message:
    """By its tool ``bash``; it ends by a command."""

    def shell(command: str) -> _Act:
        return "bash", {"command": command}

    ((text, name),) = _files(messages)
    end = _saying("That is all.", shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    return _next(messages, [*_written(text, name, shell, shell(_printing(text, name))), end])


def codex(session: str, messages: Sequence[Message]) -> Message:
    """By its tool ``exec_command``, and ``spawn_agent`` for several files."""

    def shell(command: str) -> _Act:
        return "exec_command", {"cmd": command}

    files = _files(messages)
    if len(files) == 1:
        text, name = files[0]
        written = _written(text, name, shell, shell(_printing(text, name)))
        return _next(messages, [*written, _answer(files)])
    spawning = _saying(SHARING, *((f"{_SUB_AGENTS}.spawn_agent", {"message": task([file])}) for file in files))
    results = [m.content for m in messages if m.role is Role.TOOL]
    agents = [json.loads(result)["agent_id"] for result in results if "agent_id" in result]
    heard = " ".join(m.content for m in messages if m.role in (Role.TOOL, Role.USER) and "completed" in m.content)
    waiting = [agent for agent in agents if agent not in heard]
    if waiting:
        made = sum(len(message.tool_calls) for message in messages)
        call = ToolCall(f"call_{made}", f"{_SUB_AGENTS}.wait_agent", {"targets": waiting, "timeout_ms": 60_000})
        return Message(Role.ASSISTANT, "", (call,))
    return _answer(files) if agents else spawning


def claude_code(session: str, messages: Sequence[Message]) -> Message:
    """By its tools ``Bash`` and ``Write``, and ``Agent`` for several files."""

    def shell(command: str) -> _Act:
        return "Bash", {"command": command, "description": "Run it"}

    files = _files(messages)
    if len(files) == 1:
        text, name = files[0]
        write: _Act = ("Write", {"file_path": f"{WORKSPACE}/{name}", "content": text})
        return _next(messages, [*_written(text, name, shell, write), _answer(files)])
    acts: list[_Act] = [("Agent", {"description": f"Write {name}", "prompt": task([(t, name)])}) for t, name in files]
    return _next(messages, [_saying(SHARING, *acts), _answer(files)])


def _printing(text: str, name: str) -> str:
    return f"printf %s {shlex.quote(text)} > {name}"


def _answer(files: Sequence[tuple[str, str]]) -> Message:
    return _saying("Written: " + ", ".join(name for _, name in files) + ".")


POLICIES: dict[str, Script] = {"mini-swe-agent": mini_swe_agent, "codex": codex, "claude-code": claude_code}
