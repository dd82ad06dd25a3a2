"""The environment's verifier as a scorer."""

from __future__ import annotations

from agentrl.protocols import Environment, Verifying
from agentrl.types.environment import Score, check_score
from agentrl.types.errors import Boundary, boundary, deadline


class Verifier(Verifying):
    """Asks the environment that played the episode, within a deadline."""

    def __init__(self, timeout_s: float, name: str = "verifier", weight: float = 1.0) -> None:
        self.name, self.weight = name, weight
        self._timeout_s = timeout_s

    async def score(self, environment: Environment) -> Score:
        """The environment's verdict. Raises EpisodeError."""
        async with deadline("environment.score", self._timeout_s):
            with boundary(Boundary.ENVIRONMENT, "score"):
                return check_score(await environment.score())
