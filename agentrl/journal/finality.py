"""When what the buffer wrote is final: the rule by which a checkpoint covers the entries before it.

A policy's `Taken` at version v makes step v + 1 and is covered by the first `Checkpointed` behind it that holds at
least that step of the policy, a `Stepped` by one that holds its own, a `Dropped` or `LeftOut` by any. A step that was
taken again, because a run went back to an older checkpoint, counts as it was taken last: the episodes of the lost
attempt are not final. An episode is final when every policy that trains its group has taken it or left it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentrl.journal.entries import Checkpointed, Dropped, Entry, LeftOut, Stepped, Taken


class Covered(NamedTuple):
    """Places of an entry and of the checkpoint that covers it.

    An entry that is covered `is_committed` unless it is a step that was taken again later.
    """

    place: int
    checkpoint: int
    is_committed: bool


def is_held(entry: Entry, checkpoint: Checkpointed) -> bool:
    """Whether a checkpoint behind an entry of the buffer holds what it says. Raises TypeError for other entries."""
    match entry:
        case Taken():
            return entry.step + 1 <= checkpoint.steps.get(entry.policy, 0)
        case Stepped():
            return entry.step <= checkpoint.steps.get(entry.policy, 0)
        case Dropped() | LeftOut():
            return True
    raise TypeError(f"{type(entry).__name__} is of one episode, not of the buffer")


def committed(entries: Sequence[Entry]) -> list[Covered]:
    """What the checkpoints among the buffer's entries cover, in the order of checkpoints and then of entries."""
    covered: list[Covered] = []
    waiting: list[int] = []
    for place, entry in enumerate(entries):
        if not isinstance(entry, Checkpointed):
            waiting.append(place)
            continue
        done = [p for p in waiting if is_held(entries[p], entry)]
        waiting = [p for p in waiting if not is_held(entries[p], entry)]
        taken_last = {_step_of(entries[p]): p for p in done if isinstance(entries[p], Taken)}
        for p in done:
            is_committed = not isinstance(entries[p], Taken) or taken_last[_step_of(entries[p])] == p
            covered.append(Covered(p, place, is_committed))
    return covered


def named_by(entry: Entry) -> list[tuple[str, str, tuple[str, ...]]]:
    """Episodes that an entry of the buffer brings nearer to their end, once it is covered.

    Each with the policy that is done with it, and all policies that must be; both are empty where nobody trains it.
    """
    match entry:
        case Taken():
            policies = entry.policies or ((entry.policy,),) * len(entry.groups)
            return [
                (name, entry.policy, of_group)
                for (_, names), of_group in zip(entry.groups, policies, strict=True)
                for name in names
            ]
        case LeftOut():
            return [(name, entry.policy, entry.policies) for name in entry.episodes]
        case Dropped():
            return [(name, "", ()) for name in entry.episodes]
    return []


def _step_of(entry: Entry) -> tuple[str, int] | None:
    return (entry.policy, entry.step) if isinstance(entry, Taken) else None
