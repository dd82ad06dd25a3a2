"""When what the buffer wrote is final: the rule by which a checkpoint covers the entries before it.

A `Taken` at versions v makes step v + 1 and is covered by the first `Checkpointed` behind it of at least that step,
a `Stepped` by one of at least its own, a `Dropped` by any. A step that was taken again, because a run went back
to an older checkpoint, counts as it was taken last: the episodes of the lost attempt are not final.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.journal.entries import NUMBERS, Checkpointed, Dropped, Entry, Stepped, Taken

TAKEN, CHECKPOINTED = NUMBERS[Taken], NUMBERS[Checkpointed]


@dataclass(frozen=True, slots=True)
class Mark:
    """An entry of the buffer as the rule sees it: some number of it, its kind, and the step that covers it."""

    number: int
    kind: int
    step: int


@dataclass(frozen=True, slots=True)
class Covered:
    """An entry and the checkpoint that covers it; `counts` is false for a step that was taken again later."""

    number: int
    checkpoint: int
    counts: bool


def step_of(entry: Entry) -> int:
    """The step that a checkpoint must hold to cover an entry; its own for a checkpoint. Raises TypeError."""
    match entry:
        case Taken():
            return 1 + max((version.step for version in entry.versions.values()), default=-1)
        case Stepped():
            return max((version.step for version in entry.versions.values()), default=0)
        case Dropped():
            return 0
        case Checkpointed():
            return entry.step
    raise TypeError(f"{type(entry).__name__} is of one episode, not of the buffer")


def settle(marks: Iterable[Mark]) -> list[Covered]:
    """What the checkpoints among the marks cover, in the order of the journal."""
    covered: list[Covered] = []
    waiting: list[Mark] = []
    for mark in marks:
        if mark.kind != CHECKPOINTED:
            waiting.append(mark)
            continue
        done = [entry for entry in waiting if entry.step <= mark.step]
        waiting = [entry for entry in waiting if entry.step > mark.step]
        last = {entry.step: entry.number for entry in done if entry.kind == TAKEN}
        covered += [Covered(e.number, mark.number, e.kind != TAKEN or last[e.step] == e.number) for e in done]
    return covered
