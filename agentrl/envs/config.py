"""Which environment a run plays, and where its instances live."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel


class EnvironmentConfig(ConfigModel):
    """The environment of a run."""

    name: str
    """Registered name (``agentrl env list``), or ``module:attribute``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that the environment declares."""
    placement: Literal["default", "inline", "process"] = "default"
    """Where instances run: as the environment declares, in the worker itself, or in killable processes."""
