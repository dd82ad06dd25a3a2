"""Chooses where the environments of a run live."""

from __future__ import annotations

from pathlib import Path

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.envs.process import ProcessHost
from agentrl.protocols import EnvironmentHost


def build_host(config: EnvironmentConfig, call_s: float, logs: Path) -> EnvironmentHost:
    """A host for the configured environment. Raises ConfigError if it or its options are unknown."""
    definition = load_environment(config.name)
    placement = definition.placement if config.placement == "default" else config.placement
    if placement == "inline":
        return InlineHost(definition, definition.parse_options(config.options), call_s)
    return ProcessHost(definition, config.name, config.options, call_s, logs)
