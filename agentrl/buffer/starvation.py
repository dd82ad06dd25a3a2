"""Whether dropped groups or stale tokens starve the trainer, and in words why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.buffer.config import BufferConfig
from agentrl.types.batch import TrainBatch
from agentrl.types.errors import Failure, StalledError

_SPARE_STEPS = 4
_log = logging.getLogger(__name__)
_STALENESS_WORDS = {
    "mask_spans": "masks every token",
    "wait": "masks every token",
    "withhold": "leaves out every episode with a token",
}


@dataclass(slots=True)
class DroppedGroups:
    """Counts dropped groups: in a row, which ends a run, and since the last step, which explains a stalled one.

    Example: ``DroppedGroups(200)`` gives an error at the 200th group since one was last good enough to train.
    """

    max_in_row: int
    _in_row: Counter[str] = field(default_factory=Counter)
    _since_step: Counter[str] = field(default_factory=Counter)
    _last_rewards: list[float] = field(default_factory=list)

    def add(self, reason: str, rewards: Sequence[float], last_failure: Failure | None) -> StalledError | None:
        """Count a group; the error if nothing is left to learn."""
        self._in_row[reason] += 1
        self._since_step[reason] += 1
        if reason == "no_spread":
            self._last_rewards = list(rewards)
        if self._in_row.total() < self.max_in_row:
            return None
        failure = f"; the last failure: {last_failure}" if self._in_row["group_failed"] and last_failure else ""
        return StalledError(
            f"{self._words(self._in_row)}{failure}. That makes {self._in_row.total()} groups in a row without one to "
            "train. Nothing is left to learn from these tasks: change them, or the group size"
        )

    def end_row(self) -> None:
        """A group was good enough to train."""
        self._in_row.clear()

    def begin_step(self) -> None:
        """A step was taken."""
        self._since_step.clear()

    def explain(self) -> str:
        """What was dropped since the last step, or that nothing was."""
        return self._words(self._since_step) or "no group was dropped"

    def _words(self, counts: Counter[str]) -> str:
        parts = []
        if filtered := counts["no_spread"]:
            parts.append(f"the filter 'spread' dropped {filtered} groups; the last had rewards {self._last_rewards}")
        if failed := counts["group_failed"]:
            parts.append(f"{failed} groups were dropped because too few of their episodes ended with a score")
        return "; ".join(parts)


@dataclass(slots=True)
class FailuresInRow:
    """Counts each environment's failed episodes in a row: a run ends when all of them only fail.

    One that is broken keeps failing within its share of the groups, and the others go on; a warning names it.

    Example: ``FailuresInRow(50, {"sql"})`` gives an error at the 50th failure since an episode of sql last ended well.
    """

    max_in_row: int
    environments: set[str]
    _in_row: Counter[str] = field(default_factory=Counter)

    def add(self, environment: str, failure: Failure | None) -> StalledError | None:
        """Count a failed episode; the error if nothing works any more."""
        self._in_row[environment] += 1
        if any(self._in_row[name] < self.max_in_row for name in self.environments):
            if self._in_row[environment] == self.max_in_row:
                _log.warning(
                    "environment '%s': %d episodes failed in a row; the last: %s. The others go on, and nothing of "
                    "this one is trained until its episodes end well",
                    environment, self.max_in_row, failure or "no score",
                )  # fmt: skip
            return None
        counts = ", ".join(f"{self._in_row[name]} of '{name}'" for name in sorted(self.environments))
        episodes = f"{self._in_row[environment]} episodes" if len(self.environments) == 1 else f"episodes ({counts})"
        return StalledError(
            f"{episodes} failed in a row; the last: {failure or 'no score'}. "
            "The cause is hardly the tasks: `agentrl show RUN --kind failed` has the traceback, logs/ what was "
            "printed; mend it, then resume the run"
        )

    def end_row(self, environment: str) -> None:
        """An episode ended well."""
        self._in_row[environment] = 0


@dataclass(slots=True)
class UntrainedSteps:
    """Counts a policy's steps in a row of which not one token is young enough to be trained.

    As many steps as can be in flight, max_staleness + 1, may be lost at once, as after an outage; 4 more are not.

    Example: with max_staleness 4 there is an error at the 9th step, before it is taken.
    """

    config: BufferConfig
    _in_row: int = 0

    def add(self, batch: TrainBatch) -> StalledError | None:
        """Count a step that is about to be taken; the error if steps only raise the version."""
        self._in_row = 0 if batch.num_trained_tokens else self._in_row + 1
        config = self.config
        if self._in_row <= config.staleness_bound + _SPARE_STEPS:
            return None
        or_wait = "" if config.staleness == "wait" else "; or set buffer.staleness = 'wait'"
        return StalledError(
            f"policy '{batch.policy}' has not one token to train in {self._in_row} steps in a row, up to that after "
            f"version {batch.version}: buffer.staleness = '{config.staleness}' {_STALENESS_WORDS[config.staleness]} "
            f"that is more than buffer.max_staleness = {config.max_staleness} steps old. Episodes or publications take "
            f"longer than that: raise buffer.max_staleness, or make episodes shorter{or_wait}"
        )
