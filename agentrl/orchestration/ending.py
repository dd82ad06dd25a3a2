"""How a run ends: on a signal, on the first failure of a loop, and what is said of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.orchestration.evaluation import Evaluation
from agentrl.orchestration.run_directory import RunStatus
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended."""

    run: Path
    status: RunStatus
    version: PolicyVersion
    first_evaluation: Evaluation | None
    last_evaluation: Evaluation | None
    seconds: float
    aborted_generations: int
    regenerated_requests: int
    max_staleness: int
    goodput: dict[str, float]


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop`, which is to end the run in order; a second one ends at once."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        stop()
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def first_failure(group: BaseExceptionGroup) -> BaseException:
    """The first failure of a group of groups that is not a cancellation."""
    for error in group.exceptions:
        found = first_failure(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(found, asyncio.CancelledError):
            return found
    return group.exceptions[0]
