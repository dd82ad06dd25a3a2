"""A generation that goes on until a test ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

# More than are drawn while a call is on its way, however long it takes: half a minute's work of the fastest engine.
ENDLESS_TOKENS = 15_000
ENDLESS = {"max_new_tokens": ENDLESS_TOKENS, "ignore_eos": True}
# More than were drawn but not yet sent when a pause began, as a streaming server lags behind what it draws.
MANY_TOKENS = 300
_DEADLINE_S = 240.0
_STILL_S = 0.3


class RunningRequest:
    """A streamed request, whose latest event holds all tokens that have come so far.

    Example: `await request.stop_after(300)`, behind a pause, gives an answer that has tokens of before and after it.
    """

    def __init__(self, events: AsyncIterator[Any], abort: Callable[[], Awaitable[Any]]) -> None:
        self._abort = abort
        self._latest: dict[str, Any] = {}
        self._has_news = asyncio.Condition()
        self._has_ended = False
        self.answer = asyncio.create_task(self._follow(events))
        """Its last event, which is the whole answer."""

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return len(self._latest.get("output_ids", ()))

    async def until(self, num_tokens: int) -> None:
        """Wait until so many tokens have come. Raises AssertionError if it ends before, TimeoutError."""
        async with asyncio.timeout(_DEADLINE_S), self._has_news:
            await self._has_news.wait_for(lambda: self._has_ended or self.num_tokens >= num_tokens)
        if self.num_tokens < num_tokens:
            raise AssertionError(f"it ended after {self.num_tokens} tokens: {await self.answer}")

    async def until_still(self) -> None:
        """Wait until no token comes any more, though it has not ended. Raises AssertionError, TimeoutError."""
        before = -1
        async with asyncio.timeout(_DEADLINE_S):
            while self.num_tokens != before:
                before = self.num_tokens
                await asyncio.sleep(_STILL_S)
        assert not self.answer.done(), f"it ended after {before} tokens"

    async def stop_after(self, num_more: int) -> dict[str, Any]:
        """Abort it once so many more tokens have come; its whole answer. Raises as `until`."""
        await self.until(self.num_tokens + num_more)
        await self._abort()
        return await self.answer

    async def _follow(self, events: AsyncIterator[Any]) -> dict[str, Any]:
        try:
            async for event in events:
                if event != "[DONE]":
                    self._latest = event
                    await self._notify()
            return self._latest
        finally:
            self._has_ended = True
            await self._notify()

    async def _notify(self) -> None:
        async with self._has_news:
            self._has_news.notify_all()
