"""Transport by shared disk: engines read the safetensors that the trainer staged."""

from __future__ import annotations

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.weights.ahead import AheadEngines


class DiskTransport:
    """The staged folder must be readable by the engine under the same path.

    Embedded engines read it before their pause; to SGLang, which knows no such call, it is new in the pause.
    """

    def __init__(self, in_place: bool = False) -> None:
        self._ahead = AheadEngines(in_place)

    async def needs_pause(self, engine: Engine) -> bool:
        """Not for weights in place that the engine has taken ahead. Raises EngineError."""
        return await self._ahead.needs_pause(engine)

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine read and check the folder while it generates. Raises EngineError."""
        if await self._ahead.includes(engine):
            body = {"model_path": manifest.path, "weight_version": str(manifest.version)}
            await engine.update("/stage_weights", body)

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let an engine serve what it has read, or a paused one load the staged folder. Raises EngineError."""
        if not await self._ahead.needs_pause(engine):
            await self._ahead.swap(engine, manifest.version)
            return
        await engine.update_weights_from_disk(manifest.path, manifest.version)

    async def forget(self, engine: str) -> None:
        """It may come back as another kind of server."""
        self._ahead.forget(engine)

    async def close(self) -> None:
        """Nothing is kept."""
