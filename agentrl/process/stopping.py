"""How a process is asked to stop: once in order, twice at once, whatever it does at that moment.

Python's own handler raises KeyboardInterrupt wherever the main thread is, and a callback of an event loop swallows
that; a handler of an event loop waits for its next turn, which code that never awaits does not give. These handlers run
between any two instructions of the main thread, and raise nothing. A library that neither returns nor looks for signals
holds them up, too; `agentrl.process.standstill` finds that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from agentrl.process.parent import STOP_SIGNALS

STOPPED = 128 + signal.SIGINT
"""Exit status of a process that was asked to stop, as a shell has it of SIGINT."""
_SHOW_CURSOR = b"\x1b[?25h"
_groups: set[int] = set()


def note_group(leader: int) -> None:
    """A process of ours leads a group of its own, which is to end if this process ends at once."""
    _groups.add(leader)


def forget_group(leader: int) -> None:
    """That group has ended."""
    _groups.discard(leader)


def end_at_once(status: int) -> NoReturn:
    """End this process and the groups that it has started, without waiting for anything."""
    for leader in list(_groups):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)  # a bar of progress may have hidden it
    os._exit(status)


class StopSignals:
    """What SIGINT and SIGTERM mean to a process whose main thread runs an event loop.

    The first one, of either kind, calls what `telling` was given last, on the event loop. The second ends the process
    with status 130.

    Example: ``with StopSignals().installed() as signals, signals.telling(run.request_stop): await run.run()``.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tell: Callable[[], object] = _nothing
        self.has_come = False

    @contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Signals are handled so inside the block; outside of the main thread, where none arrive, nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """The first signal calls this inside the block, behind it nothing."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = _nothing

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.has_come:
            end_at_once(STOPPED)
        self.has_come = True
        # Not called from here: what it does is not made to be run between any two instructions.
        self._loop.call_soon_threadsafe(lambda: self._tell())


def _nothing() -> None:
    """The process is about to end by itself."""
