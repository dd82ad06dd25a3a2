"""Draws start positions, all of them won for the agent that moves first, if it plays rightly."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import xor
from typing import Annotated, TypeVar

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.task import Split, Task
from agentrl_environments.splits import split_of

Pile = TypeVar("Pile")
PILES = ("a", "b", "c")
MAX_OBJECTS = 9


class NimOptions(ConfigModel):
    """How large a game is."""

    num_piles: Annotated[int, Field(ge=2, le=len(PILES))] = 2
    """Piles at the start. Of two piles the rule is to leave them equal; of three it is harder to see."""
    max_objects: Annotated[int, Field(ge=3, le=MAX_OBJECTS)] = MAX_OBJECTS
    """Objects of a pile at most; more make games longer, and positions rarer. Two piles of 9 have 36 starts, 10 of them
    held out."""


def sample_task(options: NimOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    rng = random.Random(f"{split}-{own_seed}-{ordinal}")
    while True:
        piles = [rng.randint(1, options.max_objects) for _ in range(options.num_piles)]
        if balance(piles) and split_of_start(piles) is split:
            return Task("nim", split, ordinal, {"piles": piles})


def balance(piles: Sequence[int]) -> int:
    """Exclusive or of the piles: zero where whoever is to move loses against right play."""
    return reduce(xor, piles, 0)


def best_move(piles: Mapping[Pile, int]) -> tuple[Pile, int]:
    """Pile and number of objects that leave `balance` zero; one of the largest pile where that cannot be done.

    Example: of ``{"a": 3, "b": 5}`` it is ``("b", 2)``.
    """
    unbalanced = balance(list(piles.values()))
    for pile, number in piles.items():
        if number ^ unbalanced < number:
            return pile, number - (number ^ unbalanced)
    return max(piles, key=lambda pile: piles[pile]), 1


def split_of_start(piles: Sequence[int]) -> Split:
    """Where a start position belongs, in whatever order its piles are."""
    return split_of(" ".join(map(str, sorted(piles))))
