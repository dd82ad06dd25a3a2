"""Which game is played, and what it is made with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from agentrl_environments.packages import PackagedOptions


class GymOptions(PackagedOptions):
    """A game of Gymnasium's interface, and what it is made with."""

    source: Literal["gymnasium", "gem", "factory"] = "gymnasium"
    """Whose games: Gymnasium's and gem's by id; those of a ``factory`` are made by a function of yours."""
    game: str = "FrozenLake-v1"
    """Gymnasium's id; gem's, such as ``game:Mastermind-v0-easy``; or ``module:attribute``, which is called with
    `arguments` and gives an object with ``reset(seed=...)`` and ``step(text)`` as Gymnasium has them."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the game is made with, by name. FrozenLake takes ``size`` besides: without a map of its own, each task has
    one of so many rows (4, or 8)."""
    instructions: str | None = None
    """What the first message begins with, in place of what the adapter says of Gymnasium's toy games."""
    actions: tuple[str, ...] = ()
    """Names of a Gymnasium game's numbered actions, in order; needed for games that the adapter does not know, whose
    actions are else named by their numbers."""
