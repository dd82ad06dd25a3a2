"""Where a run's processes are, and which of them share devices."""

from __future__ import annotations

from agentrl.config.base import ConfigModel


class RuntimeConfig(ConfigModel):
    """Where the processes of a run are."""

    colocated: bool = False
    """Whether engines and trainer of a policy share devices: engines stand still while the trainer steps, and give back
    the memory of their KV caches."""
