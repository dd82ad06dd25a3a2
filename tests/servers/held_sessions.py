"""Many episodes of `tests/servers/echo.py` at once, by OpenEnv's protocol; each proves whose answers it gets.

A session says words that no other says, and its reward is the length of them all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.servers.raw_websocket import RawConnection

Say = Callable[[str], Awaitable[bytes]]
_AT_ONCE = 50
_WORDS = 5


@dataclass(frozen=True, slots=True)
class Held:
    """What became of sessions that were all open before the first ended."""

    ended_well: int
    crosstalk: int
    """Answers that were not those of their session."""


async def begin_episode(connection: RawConnection) -> Say:
    """Reset; gives what says a word, and gives the frame that comes back."""
    await connection.ask(b'{"type":"reset","data":{"seed":1}}')
    step = b'{"type":"step","data":{"type":"call_tool","tool_name":"echo","arguments":{"word":"%s"}}}'
    return lambda word: connection.ask(step % word.encode())


async def hold_sessions(port: int, sessions: int, when_all_are_open: Callable[[], None] = lambda: None) -> Held:
    """So many episodes, whose steps are under way at the same time."""
    connections: list[RawConnection] = []
    for first in range(0, sessions, _AT_ONCE):
        some = range(min(_AT_ONCE, sessions - first))
        connections += await asyncio.gather(*(RawConnection.open(port, "/ws") for _ in some))
    says = await asyncio.gather(*map(begin_episode, connections))
    wrong = sum(await asyncio.gather(*(_count_wrong(say, number) for number, say in enumerate(says))))
    when_all_are_open()
    ends = sum(await asyncio.gather(*(_ends_well(say, number) for number, say in enumerate(says))))
    for connection in connections:
        connection.close()
    return Held(ends, wrong + sessions - ends)


def _words(session: int) -> list[str]:
    return [f"{session}-{number}" + "x" * (session % 97) for number in range(_WORDS)]


async def _count_wrong(say: Say, session: int) -> int:
    """Answers that do not say this session's word."""
    wrong = 0
    for word in _words(session):
        wrong += json.loads(await say(word))["data"]["observation"]["result"] != word
    return wrong


async def _ends_well(say: Say, session: int) -> bool:
    """Whether the reward is the length of what this session has said."""
    data = json.loads(await say("stop"))["data"]
    return bool(data["done"]) and data["reward"] == len("stop") + sum(map(len, _words(session)))
