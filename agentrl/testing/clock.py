"""An event loop on a virtual clock: waiting costs no time, and order depends on nothing but the program.

A call in another thread takes no time either: the clock stands still until it is done.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks while a timer is pending and no thread is at work: moves the clock to it instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.calls_in_threads = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or (timeout > 0 and self.calls_in_threads):
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

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """As any loop's, at one moment of the clock."""
        call = super().run_in_executor(executor, func, *args)
        self._jumping.calls_in_threads += 1
        call.add_done_callback(self._leave_thread)
        return call

    def _leave_thread(self, call: asyncio.Future[Any]) -> None:
        self._jumping.calls_in_threads -= 1


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(work)
