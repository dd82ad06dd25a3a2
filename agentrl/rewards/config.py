"""Which scorers judge an environment's episodes, and what each counts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel


class VerifierConfig(ConfigModel):
    """The environment judges by itself, at the end of play."""

    kind: Literal["verifier"] = "verifier"
    """The environment's own verdict."""
    name: str = "verifier"
    """Name of its scores in metrics and records."""
    weight: float = 1.0
    """Its part in the reward; 0 only records."""


class FunctionScorerConfig(ConfigModel):
    """A Python function judges the whole episode, some time after its end.

    No step takes the episode before it has, unless it only records.
    """

    kind: Literal["function"]
    """A function of the recipe's choice."""
    name: str
    """Name of its scores in metrics and records."""
    function: str
    """``module:attribute``; takes an `Episode`, gives a number or a `Score`, and may be a coroutine."""
    weight: float = 1.0
    """Its part in the reward; 0 only records."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one episode."""
    if_missing: Literal["drop", "leave_out"] = "drop"
    """What becomes of an episode that it cannot judge in time: it is dropped, or its reward is that of the others."""


ScorerConfig = Annotated[VerifierConfig | FunctionScorerConfig, Field(discriminator="kind")]
