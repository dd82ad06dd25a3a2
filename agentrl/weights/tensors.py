"""Transport on one host: engines map the weights from memory that a sender process shares with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError
from agentrl.weights.ahead import AheadEngines
from agentrl.weights.buckets import Bucket
from agentrl.weights.config import TensorTransportConfig
from agentrl.weights.sender import SenderProcess
from agentrl.weights.session import weight_update


class TensorTransport:
    """Shares all buckets while the engine generates; ours copy them then, SGLang in its pause."""

    def __init__(self, config: TensorTransportConfig, load_s: float, in_place: bool, logs: Path) -> None:
        self._config, self._load_s, self._in_place, self._logs = config, load_s, in_place, logs
        self._senders: dict[str, SenderProcess] = {}
        self._payloads: dict[str, list[list[str]]] = {}
        self._ahead = AheadEngines(in_place)
        self.sent_bytes = 0

    async def needs_pause(self, engine: Engine) -> bool:
        """Not for weights in place that the engine has taken ahead. Raises EngineError."""
        return await self._ahead.needs_pause(engine)

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
        self._payloads[engine.name] = payloads
        self.sent_bytes += sum(bucket.num_bytes for bucket in buckets)
        if await self._ahead.includes(engine):
            version = {"weight_version": str(manifest.version)}
            for index in range(len(payloads)):
                await self._hand_over(engine, index, "/stage_weights", version)

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine serve what it has taken, or hand over one bucket after the other; the last names the version.

        Raises:
            EngineError: names the bucket that was refused.
        """
        if await self._ahead.includes(engine):
            await self._ahead.swap(engine, manifest.version)
            return
        last = len(self._payloads[engine.name]) - 1
        whole = {"weight_version": str(manifest.version), "flush_cache": not self._in_place}
        async with weight_update(engine):
            for index in range(last + 1):
                more = whole if index == last else {"flush_cache": False}
                await self._hand_over(engine, index, "/update_weights_from_tensor", more)

    async def forget(self, engine: str) -> None:
        """End the engine's sender and free the memory that it shares."""
        self._ahead.forget(engine)
        self._payloads.pop(engine, None)
        sender = self._senders.pop(engine, None)
        if sender is not None:
            sender.kill()

    async def close(self) -> None:
        """End all senders; safe to call twice."""
        for name in list(self._senders):
            await self.forget(name)

    async def _hand_over(self, engine: Engine, index: int, path: str, more: Mapping[str, Any]) -> None:
        payloads = self._payloads[engine.name]
        try:
            await engine.update(path, {"serialized_named_tensors": payloads[index], **more})
        except EngineError as error:
            raise EngineError(f"bucket {index + 1} of {len(payloads)}: {error}") from error
