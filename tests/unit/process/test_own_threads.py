"""Calls in threads of their own: in order, apart from the loop, and with no hold on the process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentrl.process.threads import OwnThread, run_in_thread

LIMIT_S = 20.0


async def test_calls_are_carried_out_in_order_in_one_thread() -> None:
    own, seen = OwnThread("own"), []
    calls = [own.call(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(20)]
    await asyncio.wait_for(asyncio.gather(*calls), LIMIT_S)
    assert seen == [(n, "own") for n in range(20)]
    own.end()


async def test_what_was_called_before_the_end_is_still_carried_out() -> None:
    for _ in range(200):
        own = OwnThread("ending")
        call = own.call(lambda: 7)
        own.end()
        assert await asyncio.wait_for(call, LIMIT_S) == 7


async def test_a_call_after_the_end_starts_another_thread() -> None:
    own = OwnThread("again")
    first = await own.call(threading.get_ident)
    own.end()
    assert isinstance(await asyncio.wait_for(own.call(threading.get_ident), LIMIT_S), int)
    assert isinstance(first, int)
    own.end()


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3)])
async def test_an_error_reaches_the_caller_and_the_next_call_is_carried_out(error: BaseException) -> None:
    def refuse() -> None:
        raise error

    own = OwnThread("failing")
    with pytest.raises(type(error)):
        await asyncio.wait_for(own.call(refuse), LIMIT_S)
    assert await asyncio.wait_for(own.call(lambda: 1), LIMIT_S) == 1
    own.end()


async def test_a_cancelled_caller_leaves_the_thread_at_work() -> None:
    own, may_end = OwnThread("cancelled"), threading.Event()
    waiting = own.call(may_end.wait)
    waiting.cancel()
    following = own.call(lambda: 2)
    may_end.set()
    assert await asyncio.wait_for(following, LIMIT_S) == 2
    own.end()


async def test_threads_end_when_they_are_not_needed_any_more() -> None:
    before = threading.active_count()
    assert [await run_in_thread("short", lambda n=n: n) for n in range(5)] == list(range(5))
    async with asyncio.timeout(LIMIT_S):
        while threading.active_count() > before:
            await asyncio.sleep(0.001)
