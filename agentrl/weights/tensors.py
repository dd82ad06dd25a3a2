"""Transport on one host: engines map the weights from memory that a sender process shares with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError
from agentrl.weights.buckets import Bucket
from agentrl.weights.config import TensorTransportConfig
from agentrl.weights.sender import SenderProcess
from agentrl.weights.session import weight_update


class TensorTransport:
    """Shares all buckets while the engine generates; the pause only copies them inside the engine."""

    pauses = True

    def __init__(self, config: TensorTransportConfig, load_s: float, flushes: bool, logs: Path) -> None:
        self._config, self._load_s, self._flushes, self._logs = config, load_s, flushes, logs
        self._senders: dict[str, SenderProcess] = {}
        self._payloads: dict[str, list[list[str]]] = {}

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Put the staged weights into shared memory. Raises EngineError."""
        sender = self._senders.get(engine.name)
        if sender is None:
            name = f"sender-{engine.name}"
            sender = self._senders[engine.name] = await SenderProcess.start(name, self._logs / f"{name}.log")
        arguments = (manifest.path, self._config.bucket_bytes)
        await sender.call("open", *arguments, result=list[Bucket], deadline_s=self._load_s)
        payloads = await sender.call(
            "share", self._config.ranks_per_engine, result=list[list[str]], deadline_s=self._load_s
        )
        self._payloads[engine.name] = payloads

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Hand over one bucket's handles after the other; the last names the version. Raises EngineError."""
        payloads = self._payloads[engine.name]
        async with weight_update(engine):
            for index, ranks in enumerate(payloads):
                is_last = index == len(payloads) - 1
                body: dict[str, Any] = {
                    "serialized_named_tensors": ranks,
                    "flush_cache": is_last and self._flushes,
                }
                if is_last:
                    body["weight_version"] = str(manifest.version)
                what = f"bucket {index + 1} of {len(payloads)}"
                try:
                    await engine.update("/update_weights_from_tensor", body)
                except EngineError as error:
                    raise EngineError(f"{what}: {error}") from error

    async def forget(self, engine: str) -> None:
        """End the engine's sender and free the memory that it shares."""
        self._payloads.pop(engine, None)
        sender = self._senders.pop(engine, None)
        if sender is not None:
            sender.kill()

    async def close(self) -> None:
        """End all senders; safe to call twice."""
        for name in list(self._senders):
            await self.forget(name)
