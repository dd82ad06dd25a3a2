"""Which of its coroutines a process runs, legible to another process even after this one has died.

A process that plays many episodes dies, or hangs, in the midst of one of them. The mark is a few bytes of a file that
both processes have mapped: written before each step of a coroutine and cleared behind it, at the cost of a microsecond.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BYTES = 256
_NOTHING = b"\0"


class RunningMark:
    """The running side's view. Example: ``await mark.around("train-000007-1", runner.run(record))``."""

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, _BYTES)

    def around(self, name: str, work: Coroutine[Any, Any, T]) -> MarkedSteps[T]:
        """The same work, marked with a name whenever it runs and not while it waits."""
        return MarkedSteps(self, name.encode()[: _BYTES - 1] + _NOTHING, work)

    def put(self, name: bytes) -> None:
        """Mark what runs now."""
        self._bytes[: len(name)] = name


class MarkedSteps(Generic[T]):
    """Awaits a coroutine step by step."""

    def __init__(self, mark: RunningMark, name: bytes, work: Coroutine[Any, Any, T]) -> None:
        self._mark, self._name, self._work = mark, name, work

    def __await__(self) -> Generator[Any, Any, T]:
        """Waits for whatever the coroutine waits for."""
        step: Callable[[], Any] = partial(self._work.send, None)
        while True:
            self._mark.put(self._name)
            try:
                awaited = step()
            except StopIteration as end:
                result: T = end.value
                return result
            except SystemExit as end:
                # The event loop would cancel all others before it ends, and the mark would be of the last of them.
                _log.exception("%s ended the process", self._name.rstrip(_NOTHING).decode(errors="replace"))
                os._exit(end.code if isinstance(end.code, int) else 1)
            finally:
                self._mark.put(_NOTHING)
            step = yield from self._wait(awaited)

    def _wait(self, awaited: Any) -> Generator[Any, Any, Any]:
        """Waits for what the coroutine does. Returns how to go on with it."""
        try:
            value = yield awaited
        except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
            return partial(self._work.throw, error)
        return partial(self._work.send, value)


def make_mark() -> int:
    """A descriptor for both processes to have; nothing is marked."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_BYTES)
        return os.dup(file.fileno())


def read_mark(descriptor: int) -> str | None:
    """The name of what ran last, if it was still running; of a process that stands still or has ended."""
    name = os.pread(descriptor, _BYTES, 0).split(_NOTHING)[0]
    return name.decode(errors="replace") or None
