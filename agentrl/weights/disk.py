"""Transport by shared disk: engines read the safetensors that the trainer staged."""

from __future__ import annotations

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest


class DiskTransport:
    """The staged folder must be readable by the engine under the same path."""

    pauses = True

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Nothing: the staged folder is where the engine reads."""

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let a paused engine load the staged folder. Raises EngineError."""
        await engine.update_weights_from_disk(manifest.path, manifest.version)

    async def forget(self, engine: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is kept."""
