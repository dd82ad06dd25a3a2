"""A game of text as anybody might write one to Gymnasium's interface."""

from __future__ import annotations

import math

ODD = {"None": None, "nan": math.nan, "True": True}


class Counter:
    """Counts to a goal; each step but the last gives a quarter, the last a half."""

    def __init__(self, goal: int) -> None:
        self.goal, self.count = goal, 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, str]]:
        self.count = 0
        return f"0 of {self.goal}, seed {seed}", {}

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, str]]:
        self.count += 1
        is_over = self.count == self.goal
        reward = ODD.get(action, 0.5 if is_over else 0.25)
        return str(self.count), reward, is_over, False, {}


def make(goal: int) -> Counter:
    return Counter(goal)
