"""Chooses where the environments of a run live, and has them say what the run must know of them.

A run imports no environment: the first worker of each, in the Python that is its own, gives a description. The one
exception is the recipe's choice: ``placement = "inline"`` imports it here, in the process that plays its episodes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.envs.process import ProcessHost, WarmWorkers
from agentrl.envs.remote import RemoteHost, describe_remote
from agentrl.envs.servers import ServerPool, server_addresses
from agentrl.envs.starting import START_S, WorkerCommand, describe_environment
from agentrl.envs.virtual import make_python, requirements_of
from agentrl.protocols import EnvironmentHost
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError

_log = logging.getLogger(__name__)


def nobody_hears(phase: str) -> None:
    """What takes long is told to nobody."""


async def build_host(
    config: EnvironmentConfig,
    call_s: float,
    logs: Path,
    label: str = "environment",
    start_s: float = START_S,
    on_phase: Callable[[str], object] = nobody_hears,
    warm: WarmWorkers | None = None,
) -> EnvironmentHost:
    """A host for the configured environment, which its first worker describes.

    Waits for: the description, and before it for the virtual environment where it has one of its own. Unblocked by:
    these, or `start_s` for the import and as much for the description, and half an hour for the virtual environment.

    Raises:
        ConfigError: the environment or its options are unknown, its interpreter cannot load it, or no server of it
            answers.
    """
    if config.placement == "inline":
        return _build_inline(config, call_s)
    if config.placement == "remote":
        return await describe_remote(config.name, server_addresses(config), call_s)
    command = _command(config, logs, label, start_s)
    if config.placement == "venv":
        return await _build_virtual(command, config, call_s, on_phase, warm)
    description, worker = await describe_environment(command)
    own = _by_its_own_python(command, config, description)
    if own != command:
        worker.kill()
        description, worker = await describe_environment(own)
    return ProcessHost(own, description, call_s, worker, warm)


def build_described_host(
    config: EnvironmentConfig,
    known: EnvironmentDescription,
    call_s: float,
    logs: Path,
    label: str = "environment",
    warm: WarmWorkers | None = None,
) -> EnvironmentHost:
    """A host for an environment whose description is known: no worker is asked for it. Raises ConfigError."""
    if config.placement == "inline":
        return _build_inline(config, call_s)
    if config.placement == "remote":
        return RemoteHost(config.name, known, ServerPool(server_addresses(config)), call_s)
    command = _command(config, logs, label, START_S)
    if config.placement == "venv":
        command = replace(command, environment=requirements_of(config.name, config.requirements)[0])
    return ProcessHost(_by_its_own_python(command, config, known), known, call_s, warm=warm)


async def _build_virtual(
    command: WorkerCommand,
    config: EnvironmentConfig,
    call_s: float,
    on_phase: Callable[[str], object],
    warm: WarmWorkers | None,
) -> ProcessHost:
    """A host by a virtual environment of its own; the description names its Python to whoever plays elsewhere."""
    target, requirements = requirements_of(config.name, config.requirements)
    lock, log = (command.logs / f"{command.label}.{kind}" for kind in ("requirements.txt", "install.log"))
    python = await make_python(config.name, requirements, lock, log, on_phase)
    command = replace(command, environment=target, python=python)
    description, worker = await describe_environment(command)
    return ProcessHost(command, replace(description, interpreter=str(python)), call_s, worker, warm)


async def build_served_host(
    config: EnvironmentConfig, call_s: float, logs: Path, label: str, warm: WarmWorkers
) -> EnvironmentHost:
    """A host for a server's environment: in the server's own process if its definition says that its calls are short.

    Waits for: its description. Unblocked by: that, or a deadline. Raises ConfigError.
    """
    host = await build_host(config, call_s, logs, label, warm=warm)
    if host.description.placement != "inline" or host.description.interpreter is not None:
        return host
    await host.close()
    return _build_inline(config, call_s)


def _command(config: EnvironmentConfig, logs: Path, label: str, start_s: float) -> WorkerCommand:
    python = Path(sys.executable) if config.interpreter is None else config.interpreter.absolute()
    return WorkerCommand(config.name, config.options, logs, python, label, start_s)


def _by_its_own_python(
    command: WorkerCommand, config: EnvironmentConfig, description: EnvironmentDescription
) -> WorkerCommand:
    """The command by the Python that the environment's definition names, unless the recipe names one."""
    if config.interpreter is not None or description.interpreter is None:
        return command
    return replace(command, python=Path(description.interpreter))


def _build_inline(config: EnvironmentConfig, call_s: float) -> InlineHost:
    definition = load_environment(config.name)
    if definition.interpreter is not None:
        raise ConfigError(
            f"environment.placement is inline, but '{config.name}' is to run in {definition.interpreter}; leave it out"
        )
    if definition.placement != "inline":
        _log.warning(
            "environment '%s' is placed inline, and nothing says that its calls are short: one that blocks holds up "
            "all episodes of this process",
            config.name,
        )
    return InlineHost(definition, definition.parse_options(config.options), call_s)
