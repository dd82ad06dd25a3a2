"""Invented names of two words, such as ``silver ferry``, and the rule that keeps the two splits apart.

Which name belongs to which split is a matter of its checksum: no name of a held-out task is ever seen in training,
while every single word is. What must generalise is reading and copying, not a vocabulary.
"""

from __future__ import annotations

from functools import cache

from agentrl.types.task import Split
from agentrl_environments.splits import split_of

COMMON_WORDS = tuple(
    "amber ash barley birch black bronze cedar clay coal copper coral dusk elm fern flint frost glass gold hazel holly "
    "iron ivory jade larch linen maple marble mint oak olive pearl pine quartz reed ruby sage silver slate stone "
    "willow".split()
)
"""Words that every kind of name shares, so that a search for one name finds others, too."""


@cache
def names_of(first: tuple[str, ...], second: tuple[str, ...], split: Split) -> tuple[str, ...]:
    """All names of a split that are made of a first and a second word."""
    names = (f"{one} {other}" for one in first for other in second)
    return tuple(name for name in names if split_of(name) is split)
