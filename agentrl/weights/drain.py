"""Lets an engine that gets no new requests finish those that it has, for so long and no longer."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from agentrl.inference.fleet import Member
from agentrl.types.errors import EngineError

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Drained:
    """Of the requests that the run had with an engine, how many ended in time, and how many the pause cuts short."""

    finished: int
    cut: int
    seconds: float


async def drain(member: Member, limit_s: float) -> Drained:
    """Let an engine become idle; it must be held, or it hardly will.

    Requests of this run are counted here. Those of others are asked for, where the server says how many it has: it may
    be busy with theirs until the deadline.

    Waits for: the end of what the engine runs and queues. Unblocked by: it, the engine's death, `limit_s`.
    """
    began, had = time.monotonic(), member.num_requests
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await member.wait_until_idle()
            while await _is_busy(member):
                await asyncio.sleep(_POLL_S)
    return Drained(had - member.num_requests, member.num_requests, time.monotonic() - began)


async def _is_busy(member: Member) -> bool:
    """Whether the server has requests, as far as it says; one that gave no answer is asked again unless it is dead."""
    try:
        return bool(await member.engine.count_requests())
    except EngineError:
        return not member.unreachable.done()
