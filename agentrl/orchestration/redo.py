"""Steps that a crash took from a trainer are done again, from the batches on record; nothing is generated."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from agentrl.buffer.recovery import TakenStep
from agentrl.buffer.staleness import without_fresh_tokens
from agentrl.journal.entries import Stepped
from agentrl.orchestration.assembly import RunParts
from agentrl.types.batch import TrainBatch, WeightsManifest
from agentrl.types.version import PolicyVersion


class Redo:
    """Brings the trainer of one policy of a resumed run to the version that it had when the run ended.

    The weights then equal the lost ones, bit for bit, where arithmetic repeats; their digests are compared. Where
    they differ (another number of ranks, other hardware) the epoch rises: tokens of the lost weights never pass
    for tokens of the new, and engines load before they serve.
    """

    def __init__(self, parts: RunParts, policy: str) -> None:
        self._parts, self._policy = parts, policy
        self._trainer = parts.trainer(policy)
        self.version = parts.start.versions[policy]
        self.staged: WeightsManifest | None = None

    async def run(self) -> None:
        """Redo all steps on record and publish what they made. Raises TrainerError or StorageError."""
        journal, policy = self._parts.journal, self._policy
        steps = journal.recovered.redo.get(policy, ())
        if journal.is_salvaged:  # nobody knows which weights were served: they never pass for those to come
            await self._stage()
            await self._begin_epoch()
            await self._publish()
        if not steps:
            return
        first, last = steps[0].step + 1, steps[-1].step + 1
        self._parts.observer.on_phase(f"redoing steps {first} to {last} of policy '{policy}' from the journal")
        recorded = self._parts.recorder.last_step(policy)
        served = {} if journal.is_salvaged else journal.served.get(policy, {})
        newest_served = max(served, default=-1)
        for taken in steps:
            await self._redo(taken, recorded)
            if self.version.step == newest_served:
                await self._compare(served[newest_served])
        if self.version.step != newest_served:
            await journal.buffer.stepped(policy, self.version, await self._stage())
        await self._publish()

    async def _redo(self, taken: TakenStep, recorded: int) -> None:
        """Do a step again; its metrics are written unless its first doing did."""
        batch = self._of_present_epoch(await self._parts.buffer.retake(taken))
        report = await self._trainer.step(batch, is_redo=True)
        self.version = report.version
        await self._parts.buffer.trained(self._policy, self.version)
        if self.version.step > recorded:
            counted = self._parts.counted(self._policy)
            self._parts.recorder.record_step(self._policy, report, batch, self._parts.buffer, 0.0, counted)

    def _of_present_epoch(self, batch: TrainBatch) -> TrainBatch:
        """The batch for the present weights.

        The record may be of an epoch that a crash has ended since: tokens of it are orphans in the same batch, and
        none was drawn by these very weights.
        """
        is_same = batch.version.epoch == self.version.epoch
        return replace(batch if is_same else without_fresh_tokens(batch), version=self.version)

    async def _compare(self, served: Stepped) -> None:
        """Go on as the version that engines may have served, if these are its weights; else in a new epoch."""
        if await self._stage() != served.digest:
            await self._begin_epoch()
        elif served.version != self.version:
            await self._rebase(served.version)

    async def _begin_epoch(self) -> None:
        """The weights are not those that engines may have served: they are of an epoch of their own."""
        version = PolicyVersion(self._parts.journal.epoch + 1, self.version.step)
        self._parts.observer.on_phase(f"the weights differ from the lost ones: going on as version {version}")
        digest = await self._rebase(version)
        await self._parts.journal.buffer.stepped(self._policy, version, digest)

    async def _rebase(self, version: PolicyVersion) -> str:
        await self._trainer.rebase(version)
        self.version = version
        return await self._stage()

    async def _stage(self) -> str:
        """Stage the present weights; returns their digest."""
        folder = self._parts.run.weights(self._policy, self.version)
        self.staged = await self._trainer.stage(self.version, folder)
        return weights_digest(self.staged)

    async def _publish(self) -> None:
        assert self.staged is not None
        await self._parts.policies[self._policy].serving.publisher.publish(self.staged)
        await self._parts.buffer.loaded(self._policy, self.staged.version)


def weights_digest(manifest: WeightsManifest) -> str:
    """One digest for all weights of a version."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(manifest.checksums.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
