"""File names and words of the terminal environment, and the rule that keeps the two splits apart.

A file's name is a stem and an ending, such as ``amber.txt``. Which names belong to which split is a matter of their
digest: no file of a held-out task has the name of one in training, while every stem and every ending is in both.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

from agentrl.types.task import Split

STEMS = tuple(
    "amber birch cedar delta ember fjord grove haven index jolly karst lemon maple north ocean pearl "
    "quartz river stone tulip umbra vapor willow zephyr".split()
)
ENDINGS = ("txt", "csv", "log", "dat")
WORDS = tuple("red green blue gray pink gold black white brown teal".split())


@cache
def file_names(split: Split, ending: str) -> tuple[str, ...]:
    """All names of a split that have an ending; about one in four is held out."""
    names = (f"{stem}.{ending}" for stem in STEMS)
    return tuple(name for name in names if (blake2b(name.encode()).digest()[0] % 4 == 0) is (split is Split.HELDOUT))
