"""Transport on one host: engines map the weights from memory that a sender process shares with them."""

from __future__ import annotations

from pathlib import Path

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.weights import Bucket, MappedWeights
from agentrl.weights.config import TensorTransportConfig
from agentrl.weights.sender import SenderProcess


class TensorTransport:
    """Shares all buckets while the engine generates; ours copy them then, SGLang in its pause."""

    def __init__(self, config: TensorTransportConfig, load_s: float, logs: Path) -> None:
        self._config, self._load_s, self._logs = config, load_s, logs
        self._senders: dict[str, SenderProcess] = {}
        self._shared: dict[str, MappedWeights] = {}
        self.sent_bytes = 0

    async def needs_pause(self, engine: Engine) -> bool:
        """As the engine says."""
        return await engine.needs_pause()

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Put the staged weights into shared memory; ours take them from there. Raises EngineError."""
        sender = self._senders.get(engine.name)
        if sender is None:
            name = f"sender-{engine.name}"
            sender = self._senders[engine.name] = await SenderProcess.start(name, self._logs / f"{name}.log")
        arguments = (manifest.path, self._config.bucket_bytes)
        buckets = await sender.call("open", *arguments, result=list[Bucket], deadline_s=self._load_s)
        placing = (self._config.ranks_per_engine, self._config.device)
        payloads = await sender.call("share", *placing, result=list[list[str]], deadline_s=self._load_s)
        source = self._shared[engine.name] = MappedWeights(tuple(map(tuple, payloads)))
        self.sent_bytes += sum(bucket.num_bytes for bucket in buckets)
        await engine.stage(source, manifest.version)

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine serve what it has taken, or take it now. Raises EngineError that names the bucket."""
        await engine.swap(self._shared[engine.name], manifest.version)

    async def forget(self, engine: str) -> None:
        """End the engine's sender and free the memory that it shares."""
        self._shared.pop(engine, None)
        sender = self._senders.pop(engine, None)
        if sender is not None:
            sender.kill()

    async def close(self) -> None:
        """End all senders; safe to call twice."""
        for name in list(self._senders):
            await self.forget(name)
