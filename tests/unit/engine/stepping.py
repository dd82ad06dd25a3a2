"""A scheduler whose steps are made one at a time, here and now, or by its own loop in a thread."""

from __future__ import annotations

from agentrl.engine.forward import PassRunner, compute
from agentrl.engine.model import ServedModel
from agentrl.engine.scheduler import Scheduler


def make_scheduler(model: ServedModel, num_slots: int, prefill_tokens: int) -> Scheduler:
    """It serves version 0.0, and computes every step of its loop in a thread."""
    return Scheduler(model, PassRunner(model, rounds=False, long_s=0.0), num_slots, prefill_tokens, "0.0")


def step(scheduler: Scheduler) -> None:
    """What the step loop does once; nothing if there is nothing to do."""
    if scheduler.num_running or scheduler.num_waiting:
        planned = scheduler.begin_step()
        scheduler.end_step(planned, compute(scheduler.model, planned, rounds=False))
