"""Several agents, one after the other: whose turn it is, the environment says."""

from __future__ import annotations

from agentrl.protocols import Scaffold, ScaffoldContext


class TurnTaking(Scaffold):
    """Gives the environment's messages to the agent that it names, and that agent's reply to the environment.

    Each agent has a conversation of its own, which holds what was said to it and by it.

    Example: opening for ``speaker`` -> its reply -> messages for ``listener`` -> its reply, which ends it.
    """

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        agent, messages = opening.agent or context.agents[0], opening.messages
        while True:
            reply = await context.agent(agent).generate(messages, opening.tools)
            result = await context.step(reply)
            if result.is_done:
                return
            agent, messages = result.agent or agent, result.messages
