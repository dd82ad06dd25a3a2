"""A virtual clock: events in the order of their times, and in the order in which they were set at equal times.

A heap of our own rather than a library of processes: sequences of an engine share its speed, so their ends move each
time one joins or leaves, and an event that is set anew is all that takes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Event = Callable[[], None]


class Clock:
    """`now` in seconds; moves from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Event) -> None:
        """Have something happen in so many seconds; with 0 behind all that happens now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self, until: Callable[[], bool]) -> bool:
        """Go from event to event until something holds; False if nothing is left to happen before."""
        while not until():
            if not self._events:
                return False
            self.now, _, event = heapq.heappop(self._events)
            event()
        return True
