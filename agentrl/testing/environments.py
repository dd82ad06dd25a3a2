"""An environment that misbehaves on request, named ``agentrl.testing.environments:faulty``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role, ToolSpec
from agentrl.types.task import Split, Task

Fault = Literal["none", "raise", "hang", "block", "crash", "kill", "spawn", "answer", "nan", "infinite", "text", "bool"]
_FOR_EVER_S = 3600.0
_REWARDS: dict[str, Any] = {"nan": float("nan"), "infinite": float("inf"), "text": "1", "bool": True}


class FaultyOptions(ConfigModel):
    """What goes wrong, and in which call."""

    fault: Fault = "none"
    """``hang`` waits for ever, ``block`` does so without yielding, ``crash`` exits, ``kill`` is a SIGKILL,
    ``spawn`` starts a child and then blocks, ``answer`` returns a text instead of a record; the others
    are rewards that are none."""
    at: Literal["create", "start", "step", "score", "close"] = "step"
    """The call in which it happens."""
    pid_file: Path | None = None
    """Where ``spawn`` writes its child's process id."""


class FaultyEnvironment:
    """Echoes tool calls, ends with the first reply that calls none, and gives 1 unless told to fail.

    Example: ``FaultyOptions(fault="crash", at="score")`` plays well and dies when it is to judge.
    """

    def __init__(self, options: FaultyOptions, task: Task) -> None:
        self._options = options
        if options.at == "create" and options.fault == "raise":
            raise RuntimeError("the database is gone")

    async def start(self) -> Opening:
        """A question and one tool."""
        return await self._fault("start") or Opening((Message(Role.USER, "count"),), (ToolSpec("query", "Query."),))

    async def step(self, action: Message) -> StepResult:
        """Every call's arguments as its result."""
        faulty = await self._fault("step")
        replies = tuple(Message(Role.TOOL, str(c.arguments), tool_call_id=c.id) for c in action.tool_calls)
        return faulty or StepResult(replies, is_done=not replies)

    async def score(self) -> Score:
        """1, or what is asked for instead of a reward."""
        return await self._fault("score") or Score(_REWARDS.get(self._options.fault, 1.0))

    async def close(self) -> None:
        """Nothing to free."""
        await self._fault("close")

    async def _fault(self, call: str) -> Any:
        options = self._options
        if options.at != call:
            return None
        if options.fault == "raise":
            raise RuntimeError("the database is gone")
        if options.fault == "hang":
            await asyncio.Event().wait()
        if options.fault == "block":
            time.sleep(_FOR_EVER_S)  # noqa: ASYNC251 - to block is the point
        if options.fault == "crash":
            os._exit(3)
        if options.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if options.fault == "spawn":
            self._spawn_and_block()
        return "no such record" if options.fault == "answer" else None

    def _spawn_and_block(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({_FOR_EVER_S})"])
        if self._options.pid_file is not None:
            self._options.pid_file.write_text(str(child.pid))
        time.sleep(_FOR_EVER_S)


def _sample_task(options: FaultyOptions, split: Split, ordinal: int, seed: int) -> Task:
    return Task("faulty", split, ordinal, {"seed": seed})


faulty = EnvironmentDefinition(
    "faulty", "Fails as it is told.", _sample_task, FaultyEnvironment, FaultyOptions, placement="process"
)
