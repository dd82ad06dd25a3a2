"""Which environment a run plays, and where its instances live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.base import ConfigModel


class EnvironmentConfig(ConfigModel):
    """The environment of a run."""

    name: str
    """Registered name (``agentrl env list``), or ``module:attribute``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that the environment declares."""
    placement: Literal["inline", "process", "venv", "remote", "served"] = "process"
    """Where instances run: in killable processes of their own; in such processes by a virtual environment of their own
    (``venv``), made of what the environment's package and `requirements` ask for; on servers (``remote``), which the
    run may start itself, in a cluster on nodes with room (``served``); or
    ``inline``, in the process that plays the episodes. That process then imports the environment, and a call that
    blocks holds up all its episodes; a thread of it samples the tasks."""
    requirements: tuple[str, ...] = ()
    """With ``venv``, packages beside those that the environment's package declares, as pip takes them:
    ``"numpy==2.1"``, or the path of a package, ``"./my_environment"``."""
    servers: tuple[str, ...] = ()
    """URLs of the servers (`agentrl env serve`) of an environment that is placed remote, such as
    ``http://10.0.0.5:8100``; the options are theirs. A new episode goes to the one with the most room."""
    num_servers: Annotated[int, Field(ge=1)] = 1
    """Servers that a run starts of an environment that is placed ``served``. Sessions outlive the worker that uses them
    and its node; with a server its sessions are lost."""
    token_variable: str | None = None
    """Environment variable with the servers' bearer token."""
    interpreter: Path | None = None
    """Python that the processes run in, such as ``/opt/browser/bin/python``, for an environment whose packages are not
    to be the run's; the base install of agentrl is enough there. Without it, that of the definition, else the run's."""

    @model_validator(mode="after")
    def _lives_in_one_place(self) -> EnvironmentConfig:
        if self.placement == "inline" and self.interpreter is not None:
            raise ValueError(f"placement is inline, but '{self.name}' is to run in {self.interpreter}; leave one out")
        if self.placement == "venv" and self.interpreter is not None:
            raise ValueError(f"placement is venv, and interpreter {self.interpreter} is another one; leave one out")
        if self.placement != "venv" and self.requirements:
            raise ValueError(
                f'requirements are those of a virtual environment; set placement = "venv" for {self.name!r}'
            )
        if (self.placement == "remote") != bool(self.servers):
            raise ValueError('placement = "remote" and servers belong together: give both, or neither')
        if self.placement == "remote" and (self.options or self.interpreter is not None):
            raise ValueError(
                f"'{self.name}' is placed remote, so options and interpreter are those of its servers; leave them out "
                "here, and give `agentrl env serve` its --options"
            )
        if self.placement != "served" and self.num_servers != 1:
            raise ValueError(f'num_servers are those that a run starts; set placement = "served" for {self.name!r}')
        if self.placement == "served" and self.interpreter is not None:
            raise ValueError(f"'{self.name}' is placed served, which has no interpreter of its own; leave it out")
        return self

    @field_validator("requirements")
    @classmethod
    def _are_requirements(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        from packaging.requirements import InvalidRequirement, Requirement  # few recipes have any

        for line in lines:
            if is_path(line):
                if not Path(line).expanduser().exists():
                    raise ValueError(f"{line} is not there; give the path of a package's folder, or of a wheel")
                continue
            try:
                Requirement(line)
            except InvalidRequirement as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"'{line}' is no requirement of pip ({reason}); write it like numpy==2.1") from None
        return lines


def is_path(line: str) -> bool:
    """Whether a requirement names a folder or a wheel instead of a distribution."""
    return line.startswith((".", "/", "~"))
