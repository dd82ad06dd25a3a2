"""Which environment a run plays, and where its instances live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from agentrl.config.base import ConfigModel
from agentrl.types.environment import Placement


class EnvironmentConfig(ConfigModel):
    """The environment of a run."""

    name: str
    """Registered name (``agentrl env list``), or ``module:attribute``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that the environment declares."""
    placement: Placement = "process"
    """Where instances run: in killable processes of their own, or ``inline``, in the process that plays the episodes.
    That process then imports the environment, and a call that blocks holds up all its episodes; a thread of it samples
    the tasks."""
    interpreter: Path | None = None
    """Python that the processes run in, such as ``/opt/browser/bin/python``, for an environment whose packages are not
    to be the run's; the base install of agentrl is enough there. Without it, that of the definition, else the run's."""

    @model_validator(mode="after")
    def _lives_in_one_place(self) -> EnvironmentConfig:
        if self.placement == "inline" and self.interpreter is not None:
            raise ValueError(f"placement is inline, but '{self.name}' is to run in {self.interpreter}; leave one out")
        return self
