"""Finds an event loop that stands still, and says where.

A plugin that never awaits holds up all that its process does, and nothing on the event loop can say so. A thread looks
whether the loop goes round, and if it has not for long, where the loop's thread is.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from agentrl.process.stopping import end_at_once
from agentrl.types.errors import place_in

_TICKS = 8
_LAST_WORDS_S = 10.0
_FAILED = 1

Tell = Callable[[FrameType, str], None]
"""Takes the innermost frame of the loop's thread, and where that is, as words."""


@contextmanager
def ended_by_standstill(limit_s: float, tell: Tell) -> Iterator[None]:
    """End the process with status 1 once the running event loop has not gone round for so long inside the block.

    `tell` is called in a thread before, with the loop's thread still standing there; it has a moment for its words.
    """
    watch = _Watch(limit_s, tell)
    thread = threading.Thread(target=watch.run, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.is_over.set()


class _Watch:
    """Counts ticks in which the loop has not gone round.

    Ticks and no clock, since a process that was halted as a whole has stood still for no fault of its own.
    """

    def __init__(self, limit_s: float, tell: Tell) -> None:
        self._limit_s, self._tell = limit_s, tell
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._has_turned = True
        self.is_over = threading.Event()

    def run(self) -> None:
        """Waits for: ticks. Unblocked by: `is_over`."""
        silent = 0
        while silent <= _TICKS:
            if self._has_turned:
                silent, self._has_turned = 0, False
                with suppress(RuntimeError):  # the loop has closed, and the block is about to end
                    self._loop.call_soon_threadsafe(self._turn)
            if self.is_over.wait(self._limit_s / _TICKS):
                return
            silent += 1
        self._end()

    def _turn(self) -> None:
        self._has_turned = True

    def _end(self) -> None:
        last_resort = threading.Timer(_LAST_WORDS_S, end_at_once, [_FAILED])
        last_resort.daemon = True
        last_resort.start()
        try:
            frame = sys._current_frames()[self._thread]
            self._tell(frame, where(frame))
        finally:
            end_at_once(_FAILED)


def where(frame: FrameType) -> str:
    """The innermost line of a plugin's code, else that of whatever code; ``line 41 of game.py, in step``."""
    stack = traceback.extract_stack(frame)
    innermost = stack[-1]
    return place_in(stack) or f"line {innermost.lineno} of {innermost.filename}, in {innermost.name}"
