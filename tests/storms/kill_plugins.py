"""The SQL environment with a count of every call it carries out, and a scaffold that plays it with several agents."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import secrets
from pathlib import Path

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.environment import StepResult
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Task
from agentrl_environments.sql import definition as sql
from agentrl_environments.sql.environment import SqlEnvironment
from agentrl_environments.sql.tasks import SqlOptions
from tests.storms.run_account import SESSIONS_SUFFIX

SCRIPT: tuple[tuple[str, dict[str, str]], ...] = (
    ("schema", {}),
    ("query", {"sql": "SELECT count(*) FROM sqlite_master"}),
    ("query", {"sql": "SELECT name FROM sqlite_master"}),
)


class CountingOptions(SqlOptions):
    """Where calls are counted, and how long one takes."""

    count_file: Path
    """One line for each call that is carried out: its effect id, the instance, the tool."""
    linger_s: float = 0.03
    """Seconds between the count and the result, so that kills hit calls that have happened and are not on record."""


class CountingSql(SqlEnvironment):
    """Counts a call at the moment at which it happens, in a file that outlives every process; sessions in another."""

    def __init__(self, options: CountingOptions, task: Task) -> None:
        super().__init__(options, task)
        self._file, self._linger_s = options.count_file, options.linger_s
        self._instance = secrets.token_hex(8)
        self._note(self._file.with_suffix(SESSIONS_SUFFIX), f"open {self._instance}")

    async def step(self, action: Message) -> StepResult:
        """Count, act, linger."""
        for call in action.tool_calls:
            self._note(self._file, f"{call.id} {self._instance} {call.name or '-'}")
        result = await super().step(action)
        await asyncio.sleep(self._linger_s)
        return result

    async def close(self) -> None:
        """Count the end of the session."""
        await super().close()
        self._note(self._file.with_suffix(SESSIONS_SUFFIX), f"close {self._instance}")

    @staticmethod
    def _note(file: Path, line: str) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


# Looking at the schema stands for a tool that acts outside: it may never be repeated, in whatever instance.
counting = dataclasses.replace(
    sql,
    name="counting",
    create=CountingSql,
    options=CountingOptions,
    is_deterministic=True,
    external_tools=frozenset({"schema"}),
)


class Alternating(Scaffold):
    """The recipe's agents act in turn; each sees what the environment says to all of them."""

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        unseen = {name: list(opening.messages) for name in context.agents}
        for name in itertools.cycle(context.agents):
            messages, unseen[name] = unseen[name], []
            result = await context.step(await context.agent(name).generate(messages, opening.tools))
            if result.is_done:
                return
            for waiting in unseen.values():
                waiting += result.messages


class Scripted(Scaffold):
    """Has the policy say something in each turn, and calls tools by a script: for policies that cannot call any."""

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        messages = opening.messages
        for name, arguments in SCRIPT:
            await context.generate(messages, opening.tools)
            messages = (await context.step(Message(Role.ASSISTANT, "", (ToolCall("", name, arguments),)))).messages
        answer = await context.generate(messages, opening.tools)
        await context.step(Message(Role.ASSISTANT, f"the answer is {len(answer.content)}"))
