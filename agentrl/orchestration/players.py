"""Builds what plays episodes from a run's configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from agentrl import registry
from agentrl.envs.definition import load_environment
from agentrl.envs.hosting import build_host
from agentrl.orchestration.config import RunConfig
from agentrl.protocols import EnvironmentHost, Scaffold
from agentrl.rewards.verifier import Verifier
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.rollouts.journal import EpisodeJournal
from agentrl.rollouts.replay import Generating
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.tokens.chat import ChatFormat
from agentrl.types.errors import ConfigError
from agentrl.types.task import Split, Task


def build_scaffold(config: ScaffoldConfig) -> Scaffold:
    """The configured scaffold. Raises ConfigError if it is unknown or refuses its options."""
    kind = registry.load_plugin(registry.SCAFFOLDS, config.name)
    try:
        return kind(**config.options)
    except TypeError as error:
        raise ConfigError(f"scaffold '{config.name}' does not take options {config.options}: {error}") from error


def build_environments(config: RunConfig, logs: Path) -> EnvironmentHost:
    """Where the run's environments live. Raises ConfigError."""
    return build_host(config.environment, config.rollout.limits.tool_s, logs)


def build_runner(
    config: RunConfig, engine: Generating, chat: ChatFormat, environments: EnvironmentHost, journal: EpisodeJournal
) -> EpisodeRunner:
    """A runner of the run's environment and scaffold over an engine or a router of engines."""
    policy = next(iter(config.policies))
    sampling = config.rollout.sampling
    routing = routing_of(config.policies[policy].model) if sampling.routed_experts else None
    return EpisodeRunner(
        player=Player(policy, engine, chat, sampling.build(routing)),
        scaffold=build_scaffold(config.scaffold),
        environments=environments,
        scorer=Verifier(config.rollout.limits.tool_s),
        journal=journal,
        limits=config.rollout.limits.build(),
    )


def routing_of(model: Path) -> tuple[int, int]:
    """Layers of a model folder and the experts that each token uses in one of them.

    Raises:
        ConfigError: the model has no experts, or cannot be read.
    """
    try:
        settings = json.loads((model / "config.json").read_text())
        return int(settings["num_hidden_layers"]), int(settings["num_experts_per_tok"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"rollout.sampling.routed_experts needs a model with experts; {model}/config.json does not describe "
            f"one ({type(error).__name__}: {error})"
        ) from error


def task_sampler(config: RunConfig, split: Split) -> Callable[[int], Task]:
    """Tasks of a split in the run's order, counted from 0 through all epochs. Raises ConfigError."""
    definition = load_environment(config.environment.name)
    options = definition.parse_options(config.environment.options)
    return definition.sampler(options, split, config.seed)
