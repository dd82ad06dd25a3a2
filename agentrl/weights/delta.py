"""Transport of changed values only: the engines' host rebuilds the weights, engines load them from there."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import DeltaTransportConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.sender import SenderProcess


@dataclass(frozen=True, slots=True)
class _Copy:
    """Weights of one version as the engines' host has them."""

    version: PolicyVersion
    folder: Path


class DeltaTransport:
    """Keeps two versions on the engines' host; `sent_bytes` counts what went there, not what engines read there.

    The first version goes whole. Rebuilt weights are checked against the trainer's checksums before any
    engine hears of them. One host serves all engines of the fleet, so a version is rebuilt once.
    """

    def __init__(self, config: DeltaTransportConfig, load_s: float, logs: Path) -> None:
        self._config, self._load_s, self._logs = config, load_s, logs
        self._sender: SenderProcess | None = None
        self._copy: _Copy | None = None
        self._disk = DiskTransport()
        self._lock = asyncio.Lock()
        self.sent_bytes = 0

    async def needs_pause(self, engine: Engine) -> bool:
        """As the engine says."""
        return await engine.needs_pause()

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Rebuild the version on the engines' host, unless another engine's turn did. Raises EngineError."""
        async with self._lock:
            if self._copy is None or self._copy.version != manifest.version:
                await self._bring(manifest)
        await self._disk.prepare(engine, self._rebuilt(manifest))

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine serve the rebuilt weights. Raises EngineError."""
        await self._disk.send(engine, self._rebuilt(manifest))

    async def forget(self, engine: str) -> None:
        """Nothing is kept for one engine."""

    async def close(self) -> None:
        """End the sender and free the host's memory; safe to call twice."""
        if self._sender is not None:
            self._sender.kill()
            self._sender = None
        if self._copy is not None:
            shutil.rmtree(self._copy.folder, ignore_errors=True)
            self._copy = None

    def _rebuilt(self, manifest: WeightsManifest) -> WeightsManifest:
        if self._copy is None or self._copy.version != manifest.version:
            raise EngineError(f"version {manifest.version} is no longer on the engines' host; it is sent anew")
        return dataclasses.replace(manifest, path=str(self._copy.folder))

    async def _bring(self, manifest: WeightsManifest) -> None:
        target = self._config.folder / manifest.policy / str(manifest.version)
        delta = target.with_name(target.name + ".delta")
        base = self._copy
        if base is None:
            # Without a common base everything is a change.
            try:
                await asyncio.to_thread(_copy_folder, Path(manifest.path), target)
            except OSError as error:
                raise EngineError(f"weights cannot be copied to {target}: {error}; free space there") from error
            self.sent_bytes += manifest.num_bytes
        else:
            sender = await self._running_sender()
            arguments = (str(base.folder), manifest.path, str(delta), self._config.full_above)
            num_bytes = await sender.call("delta", *arguments, result=int, deadline_s=self._load_s)
            rebuild = (str(base.folder), str(delta), str(target), manifest.checksums)
            await sender.call("rebuild", *rebuild, result=type(None), deadline_s=self._load_s)
            self.sent_bytes += num_bytes
            delta.unlink(missing_ok=True)
        self._copy = _Copy(manifest.version, target)
        if base is not None and base.folder != target:
            await asyncio.to_thread(shutil.rmtree, base.folder, True)

    async def _running_sender(self) -> SenderProcess:
        if self._sender is None or not self._sender.is_alive:
            self._sender = await SenderProcess.start("sender-delta", self._logs / "sender-delta.log")
        return self._sender


def _copy_folder(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target)
