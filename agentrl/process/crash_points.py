"""Named places at which a process can be told to die, so that recovery from each can be proven.

A process started with ``AGENTRL_CRASH_AT=worker.written:3`` kills itself with SIGKILL when it passes
``worker.written`` for the third time. Without that variable a crash point costs a comparison. The first part of a name
is the role in which it is passed: the journals of rollout worker and buffer are written by the same code.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "AGENTRL_CRASH_AT"
CRASH_POINTS = (
    "worker.segment_made",
    "worker.written",
    "worker.synced",
    "buffer.segment_made",
    "buffer.written",
    "buffer.synced",
    "episode.leased",
    "episode.opened",
    "reply.delivered",
    "reply.committed",
    "effect.intended",
    "effect.dispatched",
    "effect.resulted",
    "episode.scored",
    "episode.ended",
    "batch.taken",
    "step.done",
    "step.recorded",
    "weights.staged",
    "publish.begun",
    "publish.done",
    "checkpoint.saved",
    "checkpoint.complete",
    "ledger.written",
    "archive.drafted",
    "archive.placed",
    "archive.compacted",
    "archive.deleted",
    "trainer.stepped",
    "trainer.staged",
    "trainer.saved",
    "run.ended",
)


class _Plan:
    """Which crash point kills this process, and how often it may still be passed."""

    def __init__(self, order: str | None) -> None:
        name, _, count = (order or "").partition(":")
        if name and name not in CRASH_POINTS:
            raise ValueError(f"{VARIABLE}={order}: no crash point '{name}'; there are {', '.join(CRASH_POINTS)}")
        self.name, self.left = name, int(count or 1)


_plan = _Plan(os.environ.get(VARIABLE))


def crash_point(name: str) -> None:
    """Die here if this process was told to."""
    if _plan.name != name:
        return
    _plan.left -= 1
    if _plan.left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
