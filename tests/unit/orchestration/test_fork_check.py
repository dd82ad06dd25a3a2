"""Which environments and scaffolds are refused before any episode of theirs is forked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.base import parse_config
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.program_check import check_forks
from agentrl.types.environment import EnvironmentDescription, Recovery
from agentrl.types.errors import ConfigError


def check(recovery: Recovery, forks: int = 2, **scaffold: Any) -> None:
    table = {
        "name": "test",
        "steps": 1,
        "policies": {"main": {"model": "/model"}},
        "environments": {"mail": {"name": "mail", **({"scaffold": scaffold} if scaffold else {})}},
        "buffer": {"group_size": 4, "forks": forks},
    }
    config = parse_config(RunConfig, table, "recipe.toml")
    host: Any = SimpleNamespace(description=EnvironmentDescription("mail", recovery))
    check_forks(config, {"mail": host})


@pytest.mark.parametrize(
    ("recovery", "message"),
    [
        (Recovery(has_handles=True), "'mail' declares neither snapshots nor that it is deterministic"),
        (
            Recovery(is_deterministic=True, external_tools=frozenset({"send", "call"})),
            "tools of 'mail' act outside of it and are never repeated: call, send; set buffer.forks to 0",
        ),
    ],
)
def test_states_that_cannot_be_had_again_are_not_forked(recovery: Recovery, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(recovery)
    check(recovery, forks=0)


@pytest.mark.parametrize("recovery", [Recovery(has_snapshots=True), Recovery(is_deterministic=True, has_handles=True)])
def test_snapshots_or_replay_are_enough(recovery: Recovery) -> None:
    check(recovery)


def test_programs_are_not_forked() -> None:
    with pytest.raises(ConfigError, match="scaffold 'program' runs a program, whose state cannot be had again"):
        check(Recovery(is_deterministic=True), name="program", options={"command": ["agent"]})
