"""Chooses where a run's processes are."""

from __future__ import annotations

from agentrl.orchestration.config import RunConfig
from agentrl.process.local_place import LocalPlaces
from agentrl.process.place import Places


async def build_places(config: RunConfig) -> Places:
    """The places of a run: this machine."""
    return LocalPlaces()
