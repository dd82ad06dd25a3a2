"""Steps that a crash took from the trainer are done again, from the batches on record; nothing is generated."""

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
    """Brings the trainer of a resumed run to the version that it had when the run ended.

    The weights then equal the lost ones, bit for bit, where arithmetic repeats; their digests are compared. Where
    they differ (another number of ranks, other hardware) the epoch rises: tokens of the lost weights never pass
    for tokens of the new, and engines load before they serve.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.version = parts.start.version
        self.staged: dict[str, WeightsManifest] = {}

    async def run(self) -> None:
        """Redo all steps on record and publish what they made. Raises TrainerError or StorageError."""
        journal = self._parts.journal
        steps = journal.recovered.redo
        if journal.is_salvaged:  # nobody knows which weights were served: they never pass for those to come
            await self._stage()
            await self._begin_epoch()
            await self._publish()
        if not steps:
            return
        self._parts.observer.on_phase(f"redoing steps {steps[0].step + 1} to {steps[-1].step + 1} from the journal")
        recorded = self._parts.recorder.last_step()
        newest_served = -1 if journal.is_salvaged else max(journal.served, default=-1)
        for taken in steps:
            await self._redo(taken, recorded)
            if self.version.step == newest_served:
                await self._compare(journal.served[newest_served])
        if self.version.step != newest_served:
            await journal.buffer.stepped(dict.fromkeys(self._parts.policies, self.version), await self._stage())
        await self._publish()

    async def _redo(self, taken: TakenStep, recorded: int) -> None:
        """Do a step again; its metrics are written unless its first doing did."""
        on_record = self._parts.buffer.retake(taken)
        batches = {policy: self._of_present_epoch(batch) for policy, batch in on_record.items()}
        reports = {}
        for policy, batch in batches.items():
            reports[policy] = await self._parts.policies[policy].trainer.step(batch, is_redo=True)
        self.version = next(iter(reports.values())).version
        await self._parts.buffer.trained(dict.fromkeys(batches, self.version))
        for policy, batch in batches.items() if self.version.step > recorded else ():
            counted = self._parts.policies[policy].serving.metrics()
            self._parts.recorder.record_step(reports[policy], batch, self._parts.buffer, 0.0, counted)

    def _of_present_epoch(self, batch: TrainBatch) -> TrainBatch:
        """The batch for the present weights.

        The record may be of an epoch that a crash has ended since: tokens of it are orphans in the same batch, and
        none was drawn by these very weights.
        """
        is_same = batch.version.epoch == self.version.epoch
        return replace(batch if is_same else without_fresh_tokens(batch), version=self.version)

    async def _compare(self, served: Stepped) -> None:
        """Go on as the version that engines may have served, if these are its weights; else in a new epoch."""
        digests = await self._stage()
        if digests != served.digests:
            await self._begin_epoch()
        elif (version := next(iter(served.versions.values()))) != self.version:
            await self._rebase(version)

    async def _begin_epoch(self) -> None:
        """The weights are not those that engines may have served: they are of an epoch of their own."""
        version = PolicyVersion(self._parts.journal.epoch + 1, self.version.step)
        self._parts.observer.on_phase(f"the weights differ from the lost ones: going on as version {version}")
        digests = await self._rebase(version)
        await self._parts.journal.buffer.stepped(dict.fromkeys(digests, version), digests)

    async def _rebase(self, version: PolicyVersion) -> dict[str, str]:
        for parts in self._parts.policies.values():
            await parts.trainer.rebase(version)
        self.version = version
        return await self._stage()

    async def _stage(self) -> dict[str, str]:
        """Stage the present weights of all policies; returns their digests."""
        for policy, parts in self._parts.policies.items():
            folder = self._parts.run.weights(policy, self.version)
            self.staged[policy] = await parts.trainer.stage(self.version, folder)
        return {policy: weights_digest(manifest) for policy, manifest in self.staged.items()}

    async def _publish(self) -> None:
        for policy, manifest in self.staged.items():
            await self._parts.policies[policy].serving.publisher.publish(manifest)
            await self._parts.buffer.loaded({policy: manifest.version})


def weights_digest(manifest: WeightsManifest) -> str:
    """One digest for all weights of a version."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(manifest.checksums.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
