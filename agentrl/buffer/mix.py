"""Which environment each group of a run plays: a fixed sequence in which every stretch has the declared shares."""

from __future__ import annotations

from collections.abc import Mapping


class Mix:
    """Numbers of groups to environments and back.

    Number n goes to the environment that lies furthest behind its weight among the first n + 1. The sequence depends
    on the weights alone, so a resumed run goes on with it, and nothing that happens to a group (slow, failed, filtered)
    gives another environment's share to its own.

    Example: weights 2 and 1 for a and b give ``a b a a b a``; number 4 is b's second: ``of(4)`` is ``("b", 1)``.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._names = list(weights)
        self._shares = [weight / total for weight in weights.values()]
        self._numbers: list[list[int]] = [[] for _ in self._names]  # of each environment's groups, in order
        self._sequence: list[tuple[int, int]] = []  # place of the environment, and its ordinal, by number

    def of(self, number: int) -> tuple[str, int]:
        """Environment of a group, and which of that environment's groups it is, counted from 0."""
        while len(self._sequence) <= number:
            self._grow()
        place, ordinal = self._sequence[number]
        return self._names[place], ordinal

    def number(self, environment: str, ordinal: int) -> int:
        """Number of an environment's group."""
        numbers = self._numbers[self._names.index(environment)]
        while len(numbers) <= ordinal:
            self._grow()
        return numbers[ordinal]

    def _grow(self) -> None:
        number = len(self._sequence)
        behind = [
            share * (number + 1) - len(numbers) for share, numbers in zip(self._shares, self._numbers, strict=True)
        ]
        # Shares of thirds and sevenths must not let rounding decide between equals.
        place = max(range(len(behind)), key=lambda n: (round(behind[n], 9), -n))
        self._sequence.append((place, len(self._numbers[place])))
        self._numbers[place].append(number)
