"""An event loop on a virtual clock: waiting costs no time, and order depends on nothing but the program."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks while a timer is pending: moves the clock to it instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.now += max(timeout, 0.0)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`time` starts at 0 and jumps to the next timer whenever there is nothing else to do.

    Example: ``run_virtual(asyncio.sleep(3600))`` returns at once.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(work)
