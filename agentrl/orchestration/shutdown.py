"""How a run ends: when it is asked to, on the first failure of a loop, and what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.run_directory import RunStatus
from agentrl.types.version import PolicyVersion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    run: Path
    status: RunStatus
    versions: dict[str, PolicyVersion]
    evaluations: tuple[Evaluation, ...]
    seconds: float
    aborted_generations: int
    regenerated_requests: int
    max_staleness: int
    goodput: dict[str, float]

    @property
    def version(self) -> PolicyVersion:
        """That of the policy that has come least far."""
        return min(self.versions.values(), key=lambda version: version.step)

    def evaluations_of(self, policy: str) -> list[Evaluation]:
        """A policy's evaluations, in order."""
        return [evaluation for evaluation in self.evaluations if evaluation.policy == policy]

    @property
    def first_evaluation(self) -> Evaluation | None:
        """The first of all; None without any."""
        return next(iter(self.evaluations), None)

    @property
    def last_evaluation(self) -> Evaluation | None:
        """The last of the same policy."""
        first = self.first_evaluation
        return self.evaluations_of(first.policy)[-1] if first is not None else None


async def result_or_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of some work, or None if `stop` is set before it is there; the work is cancelled then.

    Waits for: either. Unblocked by: either, or cancellation.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()


def first_failure(group: BaseExceptionGroup) -> BaseException:
    """The first failure of a group of groups that is not a cancellation."""
    for error in group.exceptions:
        found = first_failure(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(found, asyncio.CancelledError):
            return found
    return group.exceptions[0]
