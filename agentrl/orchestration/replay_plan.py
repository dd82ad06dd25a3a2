"""From which weights a step is done again, and which steps must be done again before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from agentrl.buffer.recovery import TakenStep
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.step_record import StepRecord
from agentrl.types.errors import ConfigError
from agentrl.types.version import FIRST_VERSION, PolicyVersion


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The weights to begin with (the policy's first model where there is no checkpoint), and all steps in order.

    The last of `steps` is the one that was asked for.
    """

    number: int
    version: PolicyVersion
    checkpoint: Path | None
    steps: tuple[TakenStep, ...]


def plan_replay(run: RunDirectory, record: StepRecord, number: int) -> ReplayPlan:
    """The shortest way to a step.

    Raises:
        ConfigError: the step, or the way to it, is not on record; names what is missing and the steps that are left.
    """
    starts = _starts(run, record.policy)
    start = _start_of(starts, number)
    reason = _obstacle(record, start, number)
    if reason is not None or start is None:
        left = [other for other in record.numbers if _obstacle(record, _start_of(starts, other), other) is None]
        can = f"steps that can be replayed: {_ranges(left)}" if left else "no step of this run can be replayed"
        raise ConfigError(f"step {number} of {run.path} cannot be replayed: {reason}; {can}")
    version, checkpoint = start
    steps = tuple(record.step(step) for step in range(version.step + 1, number + 1))
    return ReplayPlan(number, version, checkpoint, steps)


def _starts(run: RunDirectory, policy: str) -> list[tuple[PolicyVersion, Path | None]]:
    """Weights that are still there, the newest first."""
    starts: list[tuple[PolicyVersion, Path | None]] = [
        (progress.versions[policy], folder)
        for folder, progress in run.checkpoints()
        if folder == run.checkpoint(policy, progress.versions[policy].step)
    ]
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
