"""Work that may block, away from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_in_thread(name: str, work: Callable[[], Result]) -> Result:
    """The result of `work`, computed in a daemon thread: a stopped process does not wait for it.

    Waits for: the call. Unblocked by: its end, for which `work` has a deadline of its own where it waits.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised again in the loop
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=call, name=name, daemon=True).start()
    return await done
