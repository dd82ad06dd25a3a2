"""Servers with one line before them: steps of an environment, calls to a scorer."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable

from agentrl.sizing.clock import Clock


class Servers:
    """`slots` requests at a time, or calls of up to `batch` requests each, that take as long as the first asks for."""

    def __init__(self, clock: Clock, slots: float = math.inf, batch: int = 1) -> None:
        self._clock, self._slots, self._batch = clock, slots, batch
        self._busy = 0
        self._line: deque[tuple[float, Callable[[], None]]] = deque()
        self.busy_s = 0.0
        """Summed over slots."""

    def ask(self, seconds: float, on_end: Callable[[], None]) -> None:
        """Have something done that takes so long, once it is its turn."""
        self._line.append((seconds, on_end))
        self._begin()

    def _begin(self) -> None:
        while self._line and self._busy < self._slots:
            taken = [self._line.popleft() for _ in range(min(self._batch, len(self._line)))]
            seconds = taken[0][0]
            self._busy += 1
            self.busy_s += seconds
            self._clock.after(seconds, functools.partial(self._end, [on_end for _, on_end in taken]))

    def _end(self, ended: list[Callable[[], None]]) -> None:
        self._busy -= 1
        for on_end in ended:
            on_end()
        self._begin()
