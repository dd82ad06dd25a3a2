"""A policy's own earlier versions as its teacher: one engine that takes a published version now and then."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.inference.fleet import Fleet
from agentrl.protocols import WeightTransport
from agentrl.scorers.self_teacher import SelfTeacherConfig
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import EngineError, StorageError
from agentrl.weights.receipts import check_receipt


class SnapshotTeacher:
    """Follows the publications of a policy with an engine of its own, `lag_steps` behind, every `interval_steps`.

    The engine is never restarted: it is paused, swaps and shows its receipt between two batches that it scores, so that
    one version scores a batch. `fleet` has that engine alone. Staged folders that it will need are `pinned`.
    """

    def __init__(self, config: SelfTeacherConfig, fleet: Fleet, transport: WeightTransport) -> None:
        self.config, self.fleet = config, fleet
        self._transport = transport
        self._kept: deque[WeightsManifest] = deque()
        self._due = asyncio.Event()
        self._next: WeightsManifest | None = None
        self._taken: WeightsManifest | None = None
        self._last_kept_step = fleet.newest.step
        self._batches, self._changed, self._is_swapping = 0, asyncio.Condition(), False

    @property
    def pinned(self) -> set[str]:
        """Folders of staged weights that must stay."""
        return {manifest.path for manifest in (*self._kept, self._next, self._taken) if manifest is not None}

    def published(self, manifest: WeightsManifest) -> None:
        """The policy has published a version: keep it if it is one to be taken, and take what is old enough by now."""
        step = manifest.version.step
        if step - self._last_kept_step >= self.config.interval_steps:
            self._kept.append(manifest)
            self._last_kept_step = step
        while self._kept and step - self._kept[0].version.step >= self.config.lag_steps:
            self._next = self._kept.popleft()
            self._due.set()

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Score turns within the block. Waits for: a swap that is under way. Unblocked by: its end."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_swapping)
            self._batches += 1
        try:
            yield
        finally:
            async with self._changed:
                self._batches -= 1
                self._changed.notify_all()

    async def run(self) -> None:
        """Take versions as they come due.

        Waits for: one. Unblocked by: `published`; ends by cancellation. Raises EngineError if the engine does not take
        it, or cannot read it.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            # A newer one may come due while this one is read, whose folder must stay until then.
            manifest, self._next = self._next, None
            assert manifest is not None
            self._taken = manifest
            await self._take(manifest)
            self._taken = None

    async def _take(self, manifest: WeightsManifest) -> None:
        """Waits for: the batches that are being scored. Unblocked by: these, or their deadlines."""
        async with self._changed:
            self._is_swapping = True
            await self._changed.wait_for(lambda: not self._batches)
        (member,) = self.fleet.members.values()
        try:
            await self._transport.prepare(member.engine, manifest)
            await member.engine.pause()
            await self._transport.send(member.engine, manifest)
            check_receipt(await member.engine.receipt(), manifest)
            await member.engine.resume()
        except (EngineError, StorageError) as error:
            raise EngineError(f"scorer '{self.config.name}' cannot take version {manifest.version}: {error}") from error
        member.served.append(manifest.version)
        self.fleet.newest = manifest.version
        async with self._changed:
            self._is_swapping = False
            self._changed.notify_all()
