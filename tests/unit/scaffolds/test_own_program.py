"""The scaffold ``own_program`` goes with environments that bring a program, and with no others."""

from __future__ import annotations

import pytest

from agentrl.envs.config import EnvironmentConfig
from agentrl.orchestration.program_check import check_program
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError

OWN, PLAIN = EnvironmentDescription("own", has_program=True), EnvironmentDescription("plain")


async def check(scaffold: str, described: EnvironmentDescription, **placed: str) -> None:
    environment = EnvironmentConfig.model_validate({"name": described.name, **placed})
    await check_program(ScaffoldConfig(name=scaffold), environment, described, "local")


async def test_an_environment_with_a_program_is_played_by_it_and_needs_no_sandbox():
    await check("own_program", OWN)
    await check("tool_calling", PLAIN)


@pytest.mark.parametrize(
    ("scaffold", "described", "placed", "said"),
    [
        ("tool_calling", OWN, {}, r"'own' brings the program that plays it.*set scaffold\.name = \"own_program\""),
        ("own_program", PLAIN, {}, "and 'plain' has none; choose another scaffold"),
        ("own_program", OWN, {"placement": "served"}, 'placement = "served" may be another'),
    ],
    ids=["another scaffold", "no program", "on a server"],
)
async def test_what_does_not_go_together_is_named_before_the_run(scaffold, described, placed, said):
    with pytest.raises(ConfigError, match=said):
        await check(scaffold, described, **placed)
