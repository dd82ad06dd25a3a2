"""Publishes staged weights: each engine by itself is paused, swaps, proves it, and resumes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence

from agentrl.inference.calls import LostAnswerError
from agentrl.inference.fleet import EngineState, Fleet, Member
from agentrl.protocols import Publisher, WeightTransport
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.errors import EngineError, PublishError
from agentrl.types.weights import PauseMode
from agentrl.weights.config import PublishConfig
from agentrl.weights.counts import PublishCounts, PublishPhase
from agentrl.weights.drain import drain
from agentrl.weights.receipts import ReceiptBook, ReceiptError
from agentrl.weights.sentinel import check_canary

_GRACE_S = 0.2


class StagedPublisher(Publisher):
    """Publisher of one policy over its fleet.

    Invariant: an engine that serves has a receipt for the version that it serves, which is the newest one, or an older
    one while the newest is on its way to it. One that fails in any phase is set aside, its sessions go on elsewhere,
    and it is brought back by `sync`, which the resynchronizer calls. A step from which nothing is learned makes a
    version whose weights an engine holds already: it is then only told the name and proves it, and no generation is
    interrupted. `counts` says how often each of these happened.
    """

    def __init__(
        self,
        fleet: Fleet,
        transport: WeightTransport,
        config: PublishConfig,
        first: WeightsManifest,
        wait_s: float = 0.0,
    ) -> None:
        self._fleet, self._transport, self._config = fleet, transport, config
        self._newest = first
        self._wait_s = wait_s
        self._book = ReceiptBook()
        self._receipts: dict[str, Receipt] = {}
        self._syncs: dict[str, asyncio.Task[None]] = {}
        self._errors: list[Exception] = []
        self.counts = PublishCounts()

    async def publish(self, manifest: WeightsManifest) -> Sequence[Receipt]:
        """Bring the version to all engines that serve; those that do not are `sync`'s.

        Waits for: every engine's receipt or failure, but for slow ones no longer than `patience_s` after
        the first receipt: they go on in the background and catch up with what is the newest by then. With
        no engine left, for one that comes back. Unblocked by: the deadlines of the calls, and `wait_s`.

        Raises:
            PublishError: no engine serves the version; names phase and engine of each failure.
            StorageError: the weights are damaged.
            EngineTakenError: an engine belongs to another run. Both may be of an engine that was slow last time.
        """
        self._newest, self._fleet.newest = manifest, manifest.version
        for name in self._fleet.healthy:
            if name not in self._syncs:
                self._syncs[name] = asyncio.create_task(self._catch_up(name), name=f"publish-{name}")
        pending = set(self._syncs.values())
        while pending and not self._served_by(manifest):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            self._check_syncs()
        if pending:
            await asyncio.wait(pending, timeout=self._config.patience_s)
        self._check_syncs()
        if not self._served_by(manifest):
            await self._wait_for_one(manifest)
        return self._served_by(manifest)

    async def begin(self, manifest: WeightsManifest) -> None:
        """Bring a run's first version to all engines, once; those that fail are `sync`'s when the run goes on.

        Waits for: every engine's receipt or failure. Unblocked by: the deadlines of the calls.

        Raises:
            PublishError: no engine serves the version; names phase and engine of each failure.
        """
        self._newest = manifest
        await asyncio.gather(*(self.sync(name) for name in self._fleet.healthy))
        if not self._served_by(manifest):
            raise PublishError(self.describe_failure(manifest))

    async def prove(self) -> None:
        """Let all engines show that they hold the newest version already; those that do not are `sync`'s.

        Waits for: every engine's receipt or failure. Unblocked by: the deadlines of the calls.
        """
        async with asyncio.TaskGroup() as proofs:
            for name in self._fleet.healthy:
                proofs.create_task(self._prove(self._fleet.members[name], self._newest), name=f"prove-{name}")

    async def sync(self, name: str) -> Receipt | str:
        """Bring the newest version to one engine; returns its receipt, or the failure as ``engine: phase: why``.

        Waits for: a receipt, and where a newer version was published meanwhile, for that one's, since who publishes
        waits only for engines that served then. Unblocked by: it, or the first failure.
        """
        member = self._fleet.members[name]
        async with member.update_lock:
            while True:
                manifest = self._newest
                result = await self._sync(member, manifest)
                if isinstance(result, str) or manifest.version == self._newest.version:
                    return result

    def metrics(self) -> dict[str, float]:
        """Counters by name, under ``publish/``."""
        return {**self.counts.metrics(), "publish/sent_bytes_total": float(self._transport.sent_bytes)}

    async def close(self) -> None:
        """End what goes on in the background and free what the transport keeps; safe to call twice."""
        syncs = list(self._syncs.values())
        for task in syncs:
            task.cancel()
        await asyncio.gather(*syncs, return_exceptions=True)
        await self._transport.close()

    async def _catch_up(self, name: str) -> None:
        """Waits for: an engine's receipt for the newest version. Unblocked by: it, or the first failure."""
        try:
            await self.sync(name)
        except Exception as error:  # noqa: BLE001 - no failure of its engine; who publishes next raises it
            self._errors.append(error)
        finally:
            del self._syncs[name]

    def _check_syncs(self) -> None:
        """Raise what ended a sync and is no failure of its engine, also one that went on in the background."""
        if self._errors:
            raise self._errors.pop(0)

    async def _sync(self, member: Member, manifest: WeightsManifest) -> Receipt | str:
        started = time.monotonic()
        engine = member.engine
        is_held = self._holds_weights_of(member, manifest)
        try:
            if is_held:
                receipt = await self._rename(member, manifest)
            else:
                receipt = await self._swap(member, manifest)
            member.phase = PublishPhase.CANARY
            sentinel = await check_canary(engine, manifest, self._config.max_canary_gap_nats)
            self._book.enter(receipt, manifest)
        except EngineError as error:
            return await self._fail(member, manifest, error)
        self._fleet.proven(member.name)
        receipt = dataclasses.replace(receipt, seconds=time.monotonic() - started, sentinel=sentinel)
        self._receipts[member.name] = receipt
        self.counts.proven(receipt, 0 if is_held else manifest.num_bytes)
        return receipt

    def _holds_weights_of(self, member: Member, manifest: WeightsManifest) -> bool:
        """Whether an engine that serves was proven to hold a version that has these very weights."""
        if manifest.kind != "full" or manifest.unchanged_since is None or member.state is not EngineState.HEALTHY:
            return False
        receipt = self._receipts.get(member.name)
        return receipt is not None and manifest.unchanged_since <= receipt.version < manifest.version

    async def _swap(self, member: Member, manifest: WeightsManifest) -> Receipt:
        """Bring the weights and let the engine serve them. Raises EngineError."""
        engine, aborted = member.engine, 0
        member.phase = PublishPhase.PREPARE
        await self._transport.prepare(engine, manifest)
        pauses = await self._transport.needs_pause(engine)
        async with self._standing(member, pauses):
            paused = time.monotonic()
            if pauses:
                member.phase = PublishPhase.PAUSE
                aborted = await engine.pause()
            self._fleet.begin_proof(member.name, manifest.version)
            member.phase = PublishPhase.SWAP
            await self._transport.send(engine, manifest)
            member.phase = PublishPhase.RECEIPT
            receipt = await engine.receipt()
            self._book.check(receipt, manifest)
            if pauses:
                member.phase = PublishPhase.RESUME
                await engine.resume()
            gap_s = time.monotonic() - paused if pauses else 0.0
        return dataclasses.replace(receipt, aborted=aborted, gap_s=gap_s)

    @contextlib.asynccontextmanager
    async def _standing(self, member: Member, pauses: bool) -> AsyncIterator[None]:
        """The engine stands still inside, if it has to.

        Under ``drain`` what it had before its pause has ended or is cut by then, and it gets nothing new inside.
        """
        if not pauses:
            yield
        elif self._config.pause_mode is not PauseMode.DRAIN:
            with member.standing_still():
                yield
        else:
            member.phase = PublishPhase.PAUSE
            with self._fleet.held(member.name):
                self.counts.has_drained(await drain(member, self._config.drain_s))
                with member.standing_still():
                    yield

    async def _rename(self, member: Member, manifest: WeightsManifest) -> Receipt:
        """Tell the engine that what it serves has another version now. Raises EngineError."""
        self.counts.unchanged += 1
        self._fleet.begin_proof(member.name, manifest.version)
        member.phase = PublishPhase.RENAME
        # Whether it came although its answer was lost, the receipt tells.
        with contextlib.suppress(LostAnswerError):
            await member.engine.rename(manifest.version)
        member.phase = PublishPhase.RECEIPT
        receipt = await member.engine.receipt()
        self._book.check(receipt, manifest)
        return receipt

    async def _prove(self, member: Member, manifest: WeightsManifest) -> None:
        async with member.update_lock:
            try:
                member.phase = PublishPhase.RECEIPT
                receipt = await member.engine.receipt()
                self._book.check(receipt, manifest)
                member.phase = PublishPhase.CANARY
                sentinel = await check_canary(member.engine, manifest, self._config.max_canary_gap_nats)
                self._book.enter(receipt, manifest)
            except EngineError as error:
                await self._fail(member, manifest, error)
                return
            self._fleet.proven(member.name)
            self._receipts[member.name] = dataclasses.replace(receipt, sentinel=sentinel)
            self.counts.proven(receipt, 0)

    async def _fail(self, member: Member, manifest: WeightsManifest, error: EngineError) -> str:
        engine, phase = member.engine, member.phase
        self.counts.failed[phase] += 1
        self.counts.refused += isinstance(error, ReceiptError)
        self._fleet.disproven(engine.name, f"{phase} of version {manifest.version} failed: {error}")
        await self._transport.forget(engine.name)
        with contextlib.suppress(EngineError):
            await engine.abort_all()
        # SGLang gives back nothing that a pause holds, and an engine that is gone gives nothing at all.
        await asyncio.sleep(_GRACE_S)
        self._fleet.abandon(engine.name)
        return f"{engine.name}: {phase}: {error}"

    async def _wait_for_one(self, manifest: WeightsManifest) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._served_by(manifest):
                    await self._fleet.wait_for_change()
        except TimeoutError:
            raise PublishError(self.describe_failure(manifest)) from None

    def describe_failure(self, manifest: WeightsManifest | None = None) -> str:
        """Why no engine serves a version, the newest if none is given."""
        manifest = manifest or self._newest
        return (
            f"version {manifest.version} of policy '{manifest.policy}' reached no engine: {self._fleet.describe()}. "
            "Look at the engines' logs, then resume the run"
        )

    def _served_by(self, manifest: WeightsManifest) -> list[Receipt]:
        healthy = self._fleet.healthy
        receipts = (self._receipts[name] for name in healthy if name in self._receipts)
        return [receipt for receipt in receipts if receipt.version == manifest.version]
