"""Identifiers and people of the SQL environment, and the rule that keeps the two splits apart.

An identifier is two words, such as ``net_price``. Which pairs belong to which split is a matter of
their checksum, so no table or column name of a held-out task is ever seen in training, while every
single word is: what must generalise is reading and copying, not a vocabulary. Rows split likewise.
"""

from __future__ import annotations

from functools import cache

from agentrl.types.task import Split
from agentrl_environments.splits import split_of

FIRST_WORDS = tuple(
    "net gross unit base peak mean last next main side home away early late daily total "
    "spare front rear upper lower inner outer north south east west prime extra local rapid solid".split()
)
SECOND_WORDS = tuple(
    "price cost size rate score level count stock order width depth speed load power range yield "
    "share grade point limit value length weight volume output input signal margin credit budget target "
    "sample".split()
)
PEOPLE = tuple(
    "ada bob cora dan eva finn gwen hugo iris jack kira leo mona ned olga paul quin rosa seth tara "
    "uma vera wade yuri".split()
)


@cache
def identifiers(split: Split) -> tuple[str, ...]:
    """All table and column names of a split."""
    pairs = (f"{first}_{second}" for first in FIRST_WORDS for second in SECOND_WORDS)
    return tuple(name for name in pairs if split_of(name) is split)
