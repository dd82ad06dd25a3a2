"""Which tasks are done: a cursor over ordinals that skips and repeats nothing, whatever was in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FrontierState:
    """All ordinals below `low` are done, and those in `done`; what a checkpoint keeps.

    Example: tasks 0, 1 and 3 are done and 2 is in flight: ``FrontierState(2, (3,))``.
    """

    low: int = 0
    done: tuple[int, ...] = ()


@dataclass(slots=True)
class Frontier:
    """Hands out ordinals in order, leaves out what is done, and knows what to hand out after a resume."""

    _low: int = 0
    _next: int = 0
    _done: set[int] = field(default_factory=set)
    _held: set[int] = field(default_factory=set)

    @classmethod
    def restore(cls, state: FrontierState) -> Frontier:
        """Go on from a checkpoint: ordinals that were in flight come again."""
        return cls(_low=state.low, _next=state.low, _done=set(state.done))

    def hold(self, ordinals: Iterable[int]) -> None:
        """These were handed out before and are still being worked on: they do not come again."""
        self._held.update(ordinals)

    @property
    def num_begun(self) -> int:
        """Ordinals that were handed out, in this run or an earlier part of it, done or not."""
        return self._next + sum(ordinal >= self._next for ordinal in self._done | self._held)

    def peek(self) -> int:
        """The next ordinal that is neither done nor held."""
        while self._next in self._done or self._next in self._held:
            self._held.discard(self._next)
            self._next += 1
        return self._next

    def next(self) -> int:
        """That ordinal, which is now handed out."""
        ordinal = self.peek()
        self._next += 1
        return ordinal

    def finish(self, ordinals: Iterable[int]) -> None:
        """These are done and never come again; those that were done before change nothing."""
        self._done.update(ordinal for ordinal in ordinals if ordinal >= self._low)
        while self._low in self._done:
            self._done.remove(self._low)
            self._low += 1
        self._next = max(self._next, self._low)

    def is_done(self, ordinal: int) -> bool:
        """Whether it is done."""
        return ordinal < self._low or ordinal in self._done

    def state(self) -> FrontierState:
        """What a checkpoint keeps."""
        return FrontierState(self._low, tuple(sorted(self._done)))
