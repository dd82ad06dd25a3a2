"""Whether programs of scaffolds can be played: they need a sandbox, and its only way out, the gateway.

Looked at once environments are described and sandboxes are there: before engines are started, and not at each episode.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl import registry
from agentrl.envs.config import EnvironmentConfig
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.players import build_scaffold
from agentrl.protocols import EnvironmentHost
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.sandbox.client import KeeperHost
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError
from agentrl.types.program import RunsPrograms
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
    if not isinstance(build_scaffold(scaffold), RunsPrograms):
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
