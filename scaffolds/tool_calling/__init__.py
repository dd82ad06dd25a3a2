"""Native function calling: the policy calls tools until it answers without calling one."""

from __future__ import annotations

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.message import Message, Role


class ToolCalling(Scaffold):
    """Shows the opening and its tools, hands every reply to the environment, shows what comes back.

    Example: opening -> reply with a call -> tool result -> reply without a call, which ends it.
    """

    def __init__(self, system_prompt: str | None = None) -> None:
        self._system = (Message(Role.SYSTEM, system_prompt),) if system_prompt else ()

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        reply = await context.generate((*self._system, *opening.messages), opening.tools)
        while not (result := await context.step(reply)).is_done:
            reply = await context.generate(result.messages, opening.tools)
