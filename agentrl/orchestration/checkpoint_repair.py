"""A damaged checkpoint is made again: from the one before it, by the steps between that are on record."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.orchestration.assembly import StartPoint
from agentrl.orchestration.checkpoint_files import checkpoint_damage, folder_for_remake, replace_checkpoint
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.places import build_places
from agentrl.orchestration.recorder import RunObserver
from agentrl.orchestration.replay_plan import ReplayPlan, plan_replay
from agentrl.orchestration.run_directory import Progress, RunDirectory
from agentrl.orchestration.run_journal import RunJournal
from agentrl.orchestration.runtime import ProcessRuntime
from agentrl.orchestration.step_record import read_steps
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import PolicyVersion
from agentrl.weights.digests import PROGRESS, digests_of

_log = logging.getLogger(__name__)
_WEIGHTS = ("model.safetensors", "adapter/adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class CheckpointRepair:
    """Looks through the checkpoints that a run is about to go on from, and makes damaged ones again.

    Ledger, journal and tasks are those that the damaged checkpoint knew: only what the trainer wrote is made again, so
    nothing is trained twice or played anew. Weights that come out otherwise than those that were lost are of an epoch
    of their own, as everywhere.
    """

    config: RunConfig
    run: RunDirectory
    journal: RunJournal
    observer: RunObserver

    async def run_all(self, start: StartPoint) -> StartPoint:
        """Where the run goes on from once all checkpoints of `start` are whole.

        Raises:
            StorageError: one is damaged and cannot be made again; names the file, why, and what to do.
            TrainerError: the trainer failed.
        """
        versions = dict(start.versions)
        for policy, folder in start.checkpoints.items():
            progress = await asyncio.to_thread(self.run.progress, folder / PROGRESS)
            assert progress is not None
            damage = await asyncio.to_thread(checkpoint_damage, folder, progress)
            if damage is not None:
                versions[policy] = await self._repair(policy, folder, progress, versions[policy], damage)
        return replace(start, versions=versions)

    async def _repair(
        self, policy: str, folder: Path, progress: Progress, version: PolicyVersion, damage: str
    ) -> PolicyVersion:
        plan = await asyncio.to_thread(self._plan, policy, folder, version.step, damage)
        source = plan.checkpoint or "the policy's first model"
        _log.warning(
            "checkpoint %s is damaged (%s): it is made again from %s, by steps %d to %d of policy '%s' on record",
            *(folder, damage, source, plan.version.step + 1, plan.number, policy),
        )
        self.observer.on_phase(f"making the checkpoint of policy '{policy}' again")
        remade = folder_for_remake(folder)
        await self._remake(plan, remade)
        digests = await asyncio.to_thread(digests_of, remade)
        is_same = all(digests.get(name) == progress.digests.get(name) for name in _WEIGHTS)
        if not is_same:
            version = PolicyVersion(self.journal.epoch + 1, version.step)
            _log.warning("the weights of policy '%s' differ from the damaged ones: going on as %s", policy, version)
        versions = {**progress.versions, policy: version}
        await asyncio.to_thread(self._complete, folder, remade, replace(progress, versions=versions, digests=digests))
        return version

    def _plan(self, policy: str, folder: Path, step: int, damage: str) -> ReplayPlan:
        try:
            return plan_replay(self.run, read_steps(self.run, policy), step)
        except (ConfigError, StorageError) as error:
            raise StorageError(
                f"checkpoint {folder} is damaged ({damage}) and cannot be made again from the one before ({error}); "
                "restore it from a copy, or go on from the one before: `agentrl resume RUN --salvage`"
            ) from error

    async def _remake(self, plan: ReplayPlan, folder: Path) -> None:
        places = await build_places(self.config)
        runtime = ProcessRuntime(self.config, self.run.logs, places)
        try:
            trainer, version = await plan.start(self.config, runtime), plan.version
            for taken in plan.steps:
                batch = plan.batch(self.config, taken, version)
                version = (await trainer.step(batch, is_redo=True)).version
            await trainer.save(folder)
        finally:
            await runtime.close()
            await places.close()

    def _complete(self, folder: Path, remade: Path, progress: Progress) -> None:
        """Let the remade checkpoint count, and the newest one of all know its version."""
        self.run.write_progress(remade, progress)
        replace_checkpoint(folder, remade)
        self.run.write_progress(folder, progress)
        newest, last = next(self.run.checkpoints())
        if newest != folder:
            self.run.write_progress(newest, replace(last, versions={**last.versions, **_of(progress, folder)}))


def _of(progress: Progress, folder: Path) -> dict[str, PolicyVersion]:
    """The version of the policy whose checkpoint it is."""
    return {folder.parent.name: progress.versions[folder.parent.name]}
