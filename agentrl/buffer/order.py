"""Which ready groups a take may choose: how far fast groups may run ahead of slow ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def oldest_in_window(ready: Mapping[int, int], outstanding: Iterable[int], count: int, window: int | None) -> list[int]:
    """The numbers of the `count` oldest ready groups that the window lets go, in order; fewer where it lets fewer.

    The oldest are those that began at the lowest step. That is the order of their numbers, but for a task that a
    crash took before anybody played it: it keeps its number and begins anew. Under ``wait`` the bound needs the
    order of the beginnings.

    A group may go if its number is below that of the oldest outstanding group plus `window`. Ready groups do not
    hold others back: the older of them are always in the same take or in one before. So no take waits for ever:
    a step is kept waiting by the oldest outstanding group alone, whose members are dispatched before all others.

    Args:
        ready: step at which each complete group began, by its number.
        outstanding: numbers of the groups of which something is missing, running or to be scored.
        count: groups that make a step.
        window: in groups, those that were dropped counted too; None lets every group go.

    Example: 3 is slow, 4 to 8 are ready, window 4: of 4, 5 and 6 a take of two gets [4, 5], the next only [6]
    and waits, since 7 is not below 3 + 4. Once 3 is ready nothing is outstanding, and it gets [3, 6].
    """
    first_too_young = math.inf if window is None else min(outstanding, default=math.inf) + window
    may_go = (number for number in ready if number < first_too_young)
    return sorted(sorted(may_go, key=lambda number: (ready[number], number))[:count])
