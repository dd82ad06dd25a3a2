"""An agent that the environment brings: its package has a loop of its own, which asks for replies by HTTP."""

from __future__ import annotations

from typing import Literal

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.message import Message, Role
from agentrl.types.program import RunsOwnProgram
from agentrl.types.sandbox import GATEWAY_URL_VARIABLE, Command


class OwnProgram(Scaffold, RunsOwnProgram):
    """Has the environment run its own program; every reply of a model that it asks for is the policy's.

    The environment gets a command of one word, the first agent's name, with the gateway's root as ``AGENTRL_GATEWAY``
    and the session's key as ``OPENAI_API_KEY``. A program that outlives `timeout_s` is stopped.

    Example: ``OwnProgram(timeout_s=300)``.
    """

    runs_programs: Literal[True] = True
    runs_own_program: Literal[True] = True

    def __init__(self, timeout_s: float = 540.0) -> None:
        self._timeout_s = timeout_s

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        await context.start()
        async with context.gateway() as access:
            reached = {GATEWAY_URL_VARIABLE: access.url, "OPENAI_API_KEY": access.key}
            command = Command(context.agents[:1], timeout_s=self._timeout_s, environment=reached)
            result = await context.run(command)
            await context.step(Message(Role.ASSISTANT, result.stdout.decode(errors="replace")))
