"""Whether dropped groups starve the trainer, and in words why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.types.errors import Failure, StalledError


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
