"""Whether what a recipe asks for can be played in its environments: programs of scaffolds, and forks.

Looked at once environments are described and sandboxes are there: before engines are started, and not at each episode.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl import registry
from agentrl.envs.config import EnvironmentConfig
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.players import build_scaffold
from agentrl.protocols import EnvironmentHost, Scaffold
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.sandbox.client import KeeperHost
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError
from agentrl.types.program import RunsOwnProgram, RunsPrograms
from agentrl.types.sandbox import Guarantee


async def check_programs(config: RunConfig, hosts: Mapping[str, EnvironmentHost]) -> None:
    """The same of all environments of a run. Raises ConfigError."""
    for name, section in config.environments.items():
        await check_program(section.scaffold, section, hosts[name].description, config.sandbox.kind)


async def check_program(
    scaffold: ScaffoldConfig, environment: EnvironmentConfig, described: EnvironmentDescription, kind: str
) -> None:
    """Whether a scaffold's programs find what they need in an environment whose sandboxes are of a kind.

    One that does not ship with agentrl is not imported here, and not looked at.

    Waits for: the keeper of sandboxes. Unblocked by: it, or its deadline. Raises ConfigError.
    """
    if not registry.is_shipped(registry.SCAFFOLDS, scaffold.name):
        return
    built = build_scaffold(scaffold)
    if described.has_program or isinstance(built, RunsOwnProgram):
        _check_own_program(built, scaffold, environment, described)
        return
    if not isinstance(built, RunsPrograms):
        return
    what = f"scaffold '{scaffold.name}' runs a program in the environment's sandbox"
    if environment.placement == "remote":
        raise ConfigError(
            f"{what}, and those of '{environment.name}' are on servers, which reach no gateway of this machine; place "
            "it inline, in a process or in a venv"
        )
    if not described.needs_sandbox:
        raise ConfigError(
            f"{what}, and '{environment.name}' has none; choose an environment that is a SandboxEnvironment "
            "(agentrl.envs.sandboxed), or another scaffold"
        )
    if Guarantee.GATEWAY not in await KeeperHost.of_run().guarantees():
        raise ConfigError(
            f"{what}, and from sandboxes of kind '{kind}' no gateway can be reached here; set sandbox.kind = \"bwrap\""
        )


def _check_own_program(
    built: Scaffold, scaffold: ScaffoldConfig, environment: EnvironmentConfig, described: EnvironmentDescription
) -> None:
    if not isinstance(built, RunsOwnProgram):
        raise ConfigError(
            f"'{environment.name}' brings the program that plays it, and scaffold '{scaffold.name}' does not run it; "
            'set scaffold.name = "own_program"'
        )
    if not described.has_program:
        raise ConfigError(
            f"scaffold '{scaffold.name}' runs the program that an environment brings, and '{environment.name}' has "
            "none; choose another scaffold"
        )
    if environment.placement in ("remote", "served"):
        raise ConfigError(
            f"the program of '{environment.name}' asks for replies on this machine, and placement = "
            f'"{environment.placement}" may be another; place it in a process or in a venv'
        )


def check_forks(config: RunConfig, hosts: Mapping[str, EnvironmentHost]) -> None:
    """Whether the states of all of a run's environments can be had again for other episodes, if it forks any.

    Scaffolds that do not ship with agentrl are not looked at. Raises ConfigError.
    """
    for name, section in config.environments.items() if config.buffer.forks else ():
        if (reason := _why_unforked(section.scaffold, hosts[name].description)) is not None:
            raise ConfigError(f"buffer.forks is {config.buffer.forks}, and {reason}; set buffer.forks to 0")


def _why_unforked(scaffold: ScaffoldConfig, described: EnvironmentDescription) -> str | None:
    """Why no state of an episode can be had again for another one, or None."""
    recovery = described.recovery
    if recovery.external_tools:
        tools = ", ".join(sorted(recovery.external_tools))
        return f"tools of '{described.name}' act outside of it and are never repeated: {tools}"
    if not recovery.has_snapshots and not recovery.is_deterministic:
        return (
            f"'{described.name}' declares neither snapshots nor that it is deterministic, so no state of it can be had "
            "a second time"
        )
    is_shipped = registry.is_shipped(registry.SCAFFOLDS, scaffold.name)
    if is_shipped and isinstance(build_scaffold(scaffold), RunsPrograms):
        return f"scaffold '{scaffold.name}' runs a program, whose state cannot be had again"
    return None
