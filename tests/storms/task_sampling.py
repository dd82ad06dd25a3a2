"""The tasks of a run, made in the test's own process, which plays no part of a real run's."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.definition import load_environment
from agentrl.types.task import Split, Task


def task_sampler(section: EnvironmentConfig, seed: int) -> Callable[[int], Task]:
    """Training tasks of an environment in a run's order."""
    definition = load_environment(section.name)
    return definition.sampler(definition.parse_options(section.options), Split.TRAIN, seed)
