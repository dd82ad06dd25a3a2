"""Transport of a LoRA adapter alone: no pause, no cache flush, no base weight."""

from __future__ import annotations

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest

# In a checkpoint; beside its merged weights a loader with PEFT would apply it again.
ADAPTER_FOLDER = "adapter"


class AdapterTransport:
    """Engines load each version's adapter under a name of its own and serve it to generations that begin later.

    Requests in flight keep the adapter that they began with; an old one is unloaded when its last
    generation ends. The first manifest of a run is the base model itself, which engines hold already.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def needs_pause(self, engine: Engine) -> bool:
        """Never."""
        return False

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Nothing: loading disturbs nobody."""

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Load the staged adapter. Raises EngineError."""
        if manifest.kind == "adapter":
            await engine.load_adapter(manifest.path, manifest.version)
            self.sent_bytes += manifest.num_bytes

    async def forget(self, engine: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is kept."""
