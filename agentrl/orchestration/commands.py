"""The command lines of engines that a run starts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.inference.config import EmbeddedEngineConfig, SGLangEngineConfig, StartedEngineConfig
from agentrl.inference.labels import Labels
from agentrl.process.parent import CHILD
from agentrl.process.ports import LOOPBACK, is_loopback
from agentrl.process.starting import arithmetic_environment
from agentrl.types.errors import ConfigError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import PauseMode

TOKEN_VARIABLE = "AGENTRL_ENGINE_TOKEN"
"""Environment variable by which an engine that other hosts reach gets its token; command lines are shown to all."""
_NO_OVERLAP = "--disable-overlap-schedule"


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """What an engine process of a policy is started with; `number` counts the policy's engines.

    `mark` is the run's, in the label of the weights. `token` is what the engine asks for where other hosts reach it.
    """

    policy: str
    name: str
    model: Path
    version: PolicyVersion
    config: StartedEngineConfig
    is_deterministic: bool
    logs: Path
    number: int = 0
    pause_mode: PauseMode = PauseMode.ABORT
    mark: str | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """The file that takes its output."""
        return self.logs / f"{self.name}.log"

    @property
    def label(self) -> str:
        """What the engine is to call its first weights."""
        return Labels(self.name, "", self.mark).write(self.version)


def engine_command(launch: EngineLaunch, port: int, host: str = LOOPBACK) -> tuple[list[str], dict[str, str]]:
    """Command line of an engine that listens at an address of its machine, and what it adds to the environment.

    Raises:
        ConfigError: it cannot be started so.
    """
    address = ["--host", host, "--port", str(port)]
    if isinstance(launch.config, SGLangEngineConfig):
        command, environment = _sglang(launch, launch.config, address, is_loopback(host))
    else:
        command, environment = _embedded(launch, launch.config, address, is_loopback(host))
    if is_loopback(host):
        return command, environment
    if launch.token is None:
        raise ConfigError(f"engine {launch.name} would listen at {host} without a token; start it at {LOOPBACK}")
    return command, {**environment, TOKEN_VARIABLE: launch.token}


def _embedded(
    launch: EngineLaunch, config: EmbeddedEngineConfig, address: list[str], is_local: bool
) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, *CHILD, "agentrl.cli.main", "engine", str(launch.model), *address]
    command += ["--weight-version", launch.label, "--supervised", "--threads", str(config.threads)]
    command += [] if is_local else ["--token-variable", TOKEN_VARIABLE]
    command += ["--deterministic"] if launch.is_deterministic else []
    for key, value in config.args.items():
        command += _embedded_option(key, value)
    return command, arithmetic_environment(config.threads)


def _sglang(
    launch: EngineLaunch, config: SGLangEngineConfig, address: list[str], is_local: bool
) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", *(("agentrl.process.supervised",) if is_local else _guarded(launch, config))]
    command += [*config.command, "--model-path", str(launch.model), *address]
    command += ["--weight-version", launch.label]
    if launch.pause_mode is PauseMode.IN_PLACE and not any(_sglang_name(key) == _NO_OVERLAP for key in config.args):
        command.append(_NO_OVERLAP)  # else a token of the old weights is in its queue when it pauses
    for key, value in config.args.items():
        command += _sglang_option(key, value)
    environment = dict(config.env)
    if config.devices:
        if launch.number >= len(config.devices):
            raise ConfigError(
                f"policies.{launch.policy}.engine.devices has {len(config.devices)} entries, and engine {launch.name} "
                f"needs entry {launch.number + 1}; give one for each engine, and one for the evaluation's"
            )
        environment["CUDA_VISIBLE_DEVICES"] = config.devices[launch.number]
    return command, environment


def _guarded(launch: EngineLaunch, config: SGLangEngineConfig) -> tuple[str, ...]:
    """What gives SGLang its token, by a configuration file, of which it reads only one. Raises ConfigError."""
    if any(_sglang_name(key) == "--config" for key in config.args):
        raise ConfigError(
            f"policies.{launch.policy}.engine.args.config: on other hosts the engine's token takes the place of this "
            "file; put its options into engine.args"
        )
    return "agentrl.orchestration.guarded_sglang", TOKEN_VARIABLE, str(launch.logs.absolute() / f"{launch.name}.yaml")


def _embedded_option(key: str, value: object) -> list[str]:
    """Example: ``prefill_tokens, 512`` gives ``--prefill-tokens 512``."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def _sglang_option(key: str, value: object) -> list[str]:
    """Example: ``enable_lora, true`` gives ``--enable-lora``; false gives nothing, a list gives several words."""
    name = _sglang_name(key)
    if isinstance(value, bool):
        return [name] if value else []
    return [name, *(str(word) for word in (value if isinstance(value, list) else [value]))]


def _sglang_name(key: str) -> str:
    return f"--{key.replace('_', '-')}"
