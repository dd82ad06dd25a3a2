"""Which ready groups a take may choose: how far fast groups may run ahead of slow ones, and whose turn it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence


def in_window(ready: Mapping[int, int], outstanding: Iterable[int], window: int | None) -> list[int]:
    """The numbers of the ready groups that the window lets go, the oldest first.

    The oldest are those that began at the lowest step. That is the order of their numbers, but for a task that a
    crash took before anybody played it: it keeps its number and begins anew. Under ``wait`` the bound needs the
    order of the beginnings.

    A group may go if its number is below that of the oldest outstanding group plus `window`. Ready groups do not
    hold others back: the older of them are always in the same take or in one before. So no take waits for ever:
    a step is kept waiting by the oldest outstanding group alone, whose members are dispatched before all others.

    Args:
        ready: step at which each complete group began, by its number.
        outstanding: numbers of the groups of which something is missing, running or to be scored.
        window: in groups, those that were dropped counted too; None lets every group go.

    Example: 3 is slow, 4 to 8 are ready, window 4: 4, 5 and 6 may go, since 7 is not below 3 + 4. Once 3 is ready
    nothing is outstanding, and all may.
    """
    first_too_young = math.inf if window is None else min(outstanding, default=math.inf) + window
    return sorted((n for n in ready if n < first_too_young), key=lambda number: (ready[number], number))


def in_turn(
    ready: Mapping[str, Sequence[int]],
    expected: Collection[str],
    past: Mapping[str, int],
    number: Callable[[str, int], int],
    count: int,
) -> list[int]:
    """The next `count` groups if environments take turns as the mix has them; fewer if one is not ready in its turn.

    A group that was dropped had its turn. An environment of which nothing is ready nor expected is passed over.

    Args:
        ready: numbers of the groups that may go, by environment, in the order in which they are to go.
        expected: environments of which more groups will be ready without anything being taken.
        past: groups of each environment that had their turn.
        number: number in the mix of an environment's n-th group.
        count: groups that make a step.

    Example: a and b in turn, a's 0 and 2 are ready, b's 1 is running: of two it gets [0]. Once 1 is ready, [0, 1].
    """
    chosen: list[int] = []
    left, turns = {name: list(numbers) for name, numbers in ready.items()}, dict(past)
    while len(chosen) < count:
        coming = [name for name in turns if left.get(name) or name in expected]
        if not coming:
            break
        name = min(coming, key=lambda name: number(name, turns[name]))
        if not left.get(name):
            break
        chosen.append(left[name].pop(0))
        turns[name] += 1
    return chosen
