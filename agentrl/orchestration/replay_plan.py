"""From which weights a step is done again, and which steps must be done again before it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from agentrl.algorithms.credit_config import credit_columns
from agentrl.buffer.recovery import TakenStep
from agentrl.buffer.staleness import build_batch
from agentrl.orchestration.checkpoint_files import checkpoint_damage
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.runtime import ProcessRuntime
from agentrl.orchestration.step_record import StepRecord
from agentrl.trainer.handle import TrainerHandle
from agentrl.types.batch import TrainBatch
from agentrl.types.errors import ConfigError
from agentrl.types.version import FIRST_VERSION, PolicyVersion

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The weights to begin with (the policy's first model where there is no checkpoint), and all steps in order.

    The last of `steps` is the one that was asked for.
    """

    policy: str
    number: int
    version: PolicyVersion
    checkpoint: Path | None
    steps: tuple[TakenStep, ...]

    async def start(self, config: RunConfig, runtime: ProcessRuntime) -> TrainerHandle:
        """A trainer at the weights that the plan begins with. Raises ConfigError, TrainerError or StorageError."""
        settings = config.policies[self.policy]
        # A whole checkpoint is a model itself: the first one need not be on this machine.
        is_first = self.checkpoint is None or settings.trainer.lora is not None
        model = settings.model if is_first or self.checkpoint is None else self.checkpoint
        trainer = await runtime.start_trainer(self.policy, model, self.version)
        if self.checkpoint is not None:
            await trainer.restore(self.checkpoint)
        return trainer

    def batch(self, config: RunConfig, taken: TakenStep, version: PolicyVersion) -> TrainBatch:
        """The batch as it was taken; the trainer may count another epoch than the record."""
        columns = credit_columns(config.policies[self.policy].algorithm.credit)
        batch = build_batch(taken.groups, self.policy, taken.version, config.buffer_of(self.policy), columns)
        return replace(batch, version=version)


def plan_replay(run: RunDirectory, record: StepRecord, number: int) -> ReplayPlan:
    """The shortest way to a step.

    Raises:
        ConfigError: the step, or the way to it, is not on record; names what is missing and the steps that are left.
    """
    starts = _starts(run, record.policy, number)
    start = _start_of(starts, number)
    reason = _obstacle(record, start, number)
    if reason is not None or start is None:
        left = [other for other in record.numbers if _obstacle(record, _start_of(starts, other), other) is None]
        can = f"steps that can be replayed: {_ranges(left)}" if left else "no step of this run can be replayed"
        raise ConfigError(f"step {number} of {run.path} cannot be replayed: {reason}; {can}")
    version, checkpoint = start
    steps = tuple(record.step(step) for step in range(version.step + 1, number + 1))
    return ReplayPlan(record.policy, number, version, checkpoint, steps)


def _starts(run: RunDirectory, policy: str, number: int) -> list[tuple[PolicyVersion, Path | None]]:
    """Weights that are still there and whole, the newest first; says which damaged ones would have served a step."""
    starts: list[tuple[PolicyVersion, Path | None]] = []
    for folder, progress in run.checkpoints():
        version = progress.versions.get(policy, FIRST_VERSION)
        if folder != run.checkpoint(policy, version.step):
            continue
        damage = checkpoint_damage(folder, progress)
        if damage is None:
            starts.append((version, folder))
        elif version.step < number:
            _log.warning("checkpoint %s is damaged and not used: %s; restore the file from a copy", folder, damage)
    model = run.config().policies[policy].model
    return [*starts, (FIRST_VERSION, None)] if (model / "config.json").is_file() else starts


def _start_of(starts: list[tuple[PolicyVersion, Path | None]], number: int) -> tuple[PolicyVersion, Path | None] | None:
    return next((start for start in starts if start[0].step < number), None)


def _obstacle(record: StepRecord, start: tuple[PolicyVersion, Path | None] | None, number: int) -> str | None:
    """What keeps a step from being replayed from the nearest weights, in words, or None."""
    if reason := record.missing(number):
        return reason
    if start is None:
        return "no checkpoint from before it is left, and neither is the policy's first model"
    version, checkpoint = start
    between = (record.missing(step) for step in range(version.step + 1, number))
    if reason := next(filter(None, between), None):
        weights = f"checkpoint {checkpoint.name}" if checkpoint else "the policy's first model"
        return f"the newest weights before it that are left are {weights}, and on the way from there {reason}"
    return None


def _ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers for people: ``1 to 4, 6``."""
    ordered = list(numbers)
    breaks = [n for n, (a, b) in enumerate(pairwise(ordered), start=1) if b > a + 1]
    parts = [ordered[i:j] for i, j in pairwise([0, *breaks, len(ordered)])]
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
