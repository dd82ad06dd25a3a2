"""Problems that a proposer may write: sums of small digits, modulo 10. They are parsed, never evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.types.task import Split
from agentrl_environments.splits import split_of

LABELS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = (1, 2, 3, 4)
"""Digits of a problem. With all ten a model of a hundred thousand parameters is long in learning how to add."""
FEWEST_TERMS = 2
_SUM = re.compile(r"[1-4](?:\+[1-4])*")
_ANSWER = re.compile(r"[0-9]\Z")
_HELDOUT_SHARE = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """Digits to be added up, modulo 10; the more there are, the more can go wrong.

    Example: ``Problem((3, 4, 4))`` is written as ``3+4+4`` and asked as ``a3b4c4``. Its results are 3, 7 and 1, the
    last of which is the answer; whoever works it out in writing says ``a3=3b4=7c4=1``.
    """

    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        """As a proposer writes it."""
        return "+".join(map(str, self.terms))

    @property
    def asked(self) -> str:
        """As a solver reads it: each term behind a letter."""
        return "".join(f"{label}{term}" for label, term in zip(LABELS, self.terms, strict=False))

    @property
    def results(self) -> tuple[int, ...]:
        """The sum up to each term."""
        return tuple(sum(self.terms[: place + 1]) % 10 for place in range(len(self.terms)))

    @property
    def split(self) -> Split:
        """Where it belongs: no held-out problem is ever trained."""
        return split_of(self.text, _HELDOUT_SHARE)

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply ends with the answer; what it says before that is its own affair."""
        found = _ANSWER.search(reply.strip())
        return found is not None and int(found[0]) == self.results[-1]


def parse_problem(text: str) -> Problem | None:
    """The problem that a text is; None if it is anything else."""
    text = text.strip()
    return Problem(tuple(map(int, text.split("+")))) if _SUM.fullmatch(text) else None
