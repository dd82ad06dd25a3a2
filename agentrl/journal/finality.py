"""When what the buffer wrote is final: the rule by which a checkpoint covers the entries before it.

A `Taken` at versions v makes step v + 1 and is covered by the first `Checkpointed` behind it of at least that step,
a `Stepped` by one of at least its own, a `Dropped` by any. A step that was taken again, because a run went back
to an older checkpoint, counts as it was taken last: the episodes of the lost attempt are not final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentrl.journal.entries import Checkpointed, Dropped, Entry, Stepped, Taken


class Covered(NamedTuple):
    """Places of an entry and of the checkpoint that covers it.

    An entry that is covered `is_committed` unless it is a step that was taken again later.
    """

    place: int
    checkpoint: int
    is_committed: bool


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


def committed(entries: Sequence[Entry]) -> list[Covered]:
    """What the checkpoints among the buffer's entries cover, in the order of checkpoints and then of entries."""
    covered: list[Covered] = []
    waiting: list[int] = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, Checkpointed):
            waiting.append(place)
            continue
        done = [p for p in waiting if step_of(entries[p]) <= entry.step]
        waiting = [p for p in waiting if step_of(entries[p]) > entry.step]
        taken_last = {step_of(entries[p]): p for p in done if isinstance(entries[p], Taken)}
        for p in done:
            is_committed = not isinstance(entries[p], Taken) or taken_last[step_of(entries[p])] == p
            covered.append(Covered(p, place, is_committed))
    return covered
