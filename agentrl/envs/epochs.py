"""Which task of a list an ordinal stands for: every epoch has each task once, in an order of its own."""

from __future__ import annotations

import random
from array import array
from functools import lru_cache


def place_in_list(ordinal: int, size: int, seed: int) -> int:
    """Index, below `size`, of the task that comes at `ordinal`, counted from 0 through all epochs.

    A function of its arguments alone: whoever resumes at any ordinal goes on with the same epoch.

    Example: a list of 3 in the orders 2 0 1 and 0 2 1: ordinals 0 to 5 are the tasks 2, 0, 1, 0, 2, 1.
    """
    epoch, place = divmod(ordinal, size)
    return _order(size, seed, epoch)[place]


@lru_cache(maxsize=1)  # ordinals come in order, so one epoch's order is all that is asked for again
def _order(size: int, seed: int, epoch: int) -> array[int]:
    """[size] indices of an epoch in the order in which they come."""
    # Of all generators only this one's `random()` is promised to stay the same in later versions of Python.
    chance = random.Random(f"{seed}/{epoch}")
    return array("q", sorted(range(size), key=lambda _: chance.random()))
