"""Calls that block, away from the event loop, in threads that nothing else delays and no process waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
Then = Callable[[Any, BaseException | None], None]
_Call = tuple[Callable[[], Any], Then, asyncio.AbstractEventLoop]


async def run_in_thread(name: str, work: Callable[[], Result]) -> Result:
    """The result of `work`, computed in a thread of its own.

    Waits for: the call. Unblocked by: its end, for which `work` has a deadline of its own where it waits.
    """
    thread = OwnThread(name)
    try:
        return await thread.call(work)
    finally:
        thread.end()


class OwnThread:
    """Carries out one call after the other.

    The threads that an event loop has for such calls are few and shared, and the process waits for them at its end:
    a disk that does not answer would keep it for ever.

    Example: ``await OwnThread("disk").call(lambda: os.fsync(descriptor))``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """The result to come; whoever cancels it does not stop the call.

        Raises:
            RuntimeError: the process has no thread to give.
        """
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.post(work, lambda result, error: settle(done, result, error))
        return done

    def post(self, work: Callable[[], Any], then: Then) -> None:
        """Carry out `work`, then tell `then` on the event loop its result or the error that it raised.

        A turn of the loop sooner than whoever waits for a future hears of it.

        Raises:
            RuntimeError: the process has no thread to give.
        """
        if self._thread is None:
            thread = threading.Thread(target=_carry_out, args=(self._calls,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._calls.put((work, then, asyncio.get_running_loop()))

    def end(self) -> None:
        """Let the thread end behind the calls that it has; a later call starts another."""
        if self._thread is not None:
            self._thread = None
            self._calls.put(None)
            self._calls = SimpleQueue()


def _carry_out(calls: SimpleQueue[_Call | None]) -> None:
    """Waits for: calls. Unblocked by: `OwnThread.end`, or the end of the process."""
    while (call := calls.get()) is not None:
        work, then, loop = call
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - whatever it is, it belongs to the caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(then, result, error)


def settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its result, or the error if there is one, unless nobody waits for it any more."""
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
