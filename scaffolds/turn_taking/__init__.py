"""Several agents, one after the other: whose turn it is, the environment says."""

from __future__ import annotations

from agentrl.protocols import Scaffold, ScaffoldContext


class TurnTaking(Scaffold):
    """Gives the environment's messages to the agent that it names, and that agent's reply to the environment.

    Each agent has a conversation of its own, which holds what was said to it and by it; with `is_fresh` every turn
    begins a new one, so that what an agent is asked does not hang on what it did before.

    Example: opening for ``speaker`` -> its reply -> messages for ``listener`` -> its reply, which ends it.
    """

    def __init__(self, is_fresh: bool = False) -> None:
        self._is_fresh = is_fresh

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        name, messages = opening.agent or context.agents[0], opening.messages
        while True:
            agent = context.agent(name)
            reply = await (agent.rewrite if self._is_fresh else agent.generate)(messages, opening.tools)
            result = await context.step(reply)
            if result.is_done:
                return
            name, messages = result.agent or name, result.messages
