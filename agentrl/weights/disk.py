"""Transport by shared disk: engines read the safetensors that the trainer staged."""

from __future__ import annotations

from http import HTTPStatus

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineRefusedError


class DiskTransport:
    """The staged folder must be readable by the engine under the same path.

    Embedded engines read it before their pause; to SGLang, which knows no such call, it is new in the pause.
    """

    pauses = True

    def __init__(self) -> None:
        self._unprepared: set[str] = set()

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine read and check the folder while it generates. Raises EngineError."""
        if engine.name in self._unprepared:
            return
        body = {"model_path": manifest.path, "weight_version": str(manifest.version)}
        try:
            await engine.update("/stage_weights", body)
        except EngineRefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            self._unprepared.add(engine.name)

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let a paused engine load the staged folder. Raises EngineError."""
        await engine.update_weights_from_disk(manifest.path, manifest.version)

    async def forget(self, engine: str) -> None:
        """It may come back as another kind of server."""
        self._unprepared.discard(engine)

    async def close(self) -> None:
        """Nothing is kept."""
