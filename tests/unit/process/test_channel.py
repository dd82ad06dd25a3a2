"""Two ends of a channel in one process, and one end in a process that dies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Column

from agentrl.process.channel import Channel, ChannelClosedError
from agentrl.process.remote import RemoteCallError
from agentrl.process.starting import kill_group, spawn
from agentrl.types.errors import Boundary, EpisodeError

PEER = str(Path(__file__).with_name("channel_peer.py"))
DEADLINE_S = 30.0


@dataclass
class End:
    """What the tests call; `other` is the channel back to who calls."""

    other: Channel | None = None
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    heard: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for(self, number: int) -> int:
        self.began.set()
        try:
            await self.gates.setdefault(number, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return number

    def open(self, number: int) -> None:
        self.gates.setdefault(number, asyncio.Event()).set()

    def hear(self, number: int) -> None:
        self.heard.append(number)

    def count(self) -> int:
        return len(self.heard)

    async def double(self, column: Column) -> Column:
        return Column(column.values * 2, column.name)

    async def ask_back(self, depth: int) -> int:
        """Call the caller, which calls back, and so on."""
        if depth == 0 or self.other is None:
            return 0
        return 1 + await self.other.call("ask_back", depth - 1, result=int, deadline_s=DEADLINE_S)

    async def fail(self) -> None:
        raise ValueError("seven is not allowed")

    async def fail_episode(self) -> None:
        raise EpisodeError(Boundary.ENGINE, "none_healthy", "no engine")


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Channel, End, End]]:
    """Our channel, our end's object, and the other's."""
    ours, theirs = socket.socketpair()
    here, there = End(), End()
    channel = await Channel.open("there", ours, here)
    there.other = await Channel.open("here", theirs, there)
    here.other = channel
    try:
        yield channel, here, there
    finally:
        channel.close()
        there.other.close()


@given(order=st.permutations(range(8)))
def test_answers_come_to_who_asked_in_whatever_order_they_are_given(order: list[int]) -> None:
    async def body() -> None:
        async with connected() as (channel, _, _):
            calls = [
                asyncio.create_task(channel.call("wait_for", number, result=int, deadline_s=DEADLINE_S))
                for number in range(len(order))
            ]
            for number in order:
                channel.note("open", number)
                assert await calls[number] == number

    asyncio.run(body())


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 20_000), max_size=6), chunk=st.integers(1, 3_000) | st.integers(1, 70_000))
def test_frames_of_any_size_arrive_whole_however_the_stream_is_cut(sizes: list[int], chunk: int) -> None:
    async def body() -> None:
        target = End()
        sink = Channel("peer", target)
        ours, theirs = socket.socketpair()
        async with asyncio.timeout(DEADLINE_S):
            sender = await Channel.open("sink", ours, End())
            for size in sizes:
                sender.note("double", Column(np.zeros(size, np.int8)))
            sender.note("hear", len(sizes))
            await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection(sock=theirs)
            while target.heard != [len(sizes)]:
                sink.data_received(await reader.read(chunk))
            sender.close()
            writer.close()

    asyncio.run(body())


async def test_arrays_and_records_cross_unchanged() -> None:
    async with connected() as (channel, _, _):
        column = Column(np.arange(6, dtype=np.float32).reshape(2, 3), "x")
        doubled = await channel.call("double", column, result=Column, deadline_s=DEADLINE_S)
        assert (doubled.values.tolist(), doubled.values.dtype) == ((column.values * 2).tolist(), np.float32)
        doubled.values[0] = 0  # ours to write to


async def test_both_ends_call_each_other_within_calls() -> None:
    async with connected() as (channel, _, _):
        assert await channel.call("ask_back", 5, result=int, deadline_s=DEADLINE_S) == 5


async def test_notes_are_heard_in_order_and_before_a_later_call() -> None:
    async with connected() as (channel, _, there):
        for number in range(100):
            channel.note("hear", number)
        assert await channel.call("count", result=int, deadline_s=DEADLINE_S) == 100
        assert there.heard == list(range(100))


async def test_what_a_method_raises_arrives_as_data() -> None:
    async with connected() as (channel, _, _):
        with pytest.raises(RemoteCallError, match=r"there\.fail: ValueError: seven is not allowed") as caught:
            await channel.call("fail", result=int, deadline_s=DEADLINE_S)
        assert "raise ValueError" in caught.value.trace
        with pytest.raises(RemoteCallError) as caught:
            await channel.call("fail_episode", result=int, deadline_s=DEADLINE_S)
        assert str(caught.value.failure) == "engine(none_healthy): no engine"


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("_secret", (), "AttributeError"),
        ("nothing", (), "AttributeError"),
        ("hear", (), "ValueError"),
        ("hear", ("two",), "ValidationError"),
    ],
)
async def test_a_call_that_does_not_fit_is_refused_by_the_other_end(method: str, arguments, error: str) -> None:
    async with connected() as (channel, _, _):
        with pytest.raises(RemoteCallError) as caught:
            await channel.call(method, *arguments, result=type(None), deadline_s=DEADLINE_S)
        assert caught.value.error == error
        assert await channel.call("count", result=int, deadline_s=DEADLINE_S) == 0


async def test_a_deadline_ends_the_call_at_both_ends_and_no_other() -> None:
    async with connected() as (channel, _, there):
        other = asyncio.create_task(channel.call("wait_for", 1, result=int, deadline_s=DEADLINE_S))
        with pytest.raises(TimeoutError, match=r"there\.wait_for: no answer"):
            await channel.call("wait_for", 0, result=int, deadline_s=0.05)
        await channel.call("count", result=int, deadline_s=DEADLINE_S)
        assert there.cancelled == [0]
        channel.note("open", 1)
        assert await other == 1


async def test_a_call_that_is_cancelled_is_cancelled_at_the_other_end() -> None:
    async with connected() as (channel, _, there):
        call = asyncio.create_task(channel.call("wait_for", 0, result=int, deadline_s=DEADLINE_S))
        await there.began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await channel.call("count", result=int, deadline_s=DEADLINE_S)
        assert there.cancelled == [0]


async def test_when_one_end_closes_the_other_fails_what_waits_and_ends_what_it_does() -> None:
    async with connected() as (channel, _, there):
        call = asyncio.create_task(channel.call("wait_for", 0, result=int, deadline_s=DEADLINE_S))
        await there.began.wait()
        assert there.other is not None
        there.other.close()
        with pytest.raises(ChannelClosedError, match="there is gone"):
            await call
        await channel.ended()
        assert there.cancelled == [0]
        channel.note("hear", 1)
        with pytest.raises(ChannelClosedError):
            await channel.call("count", result=int, deadline_s=DEADLINE_S)


async def test_calls_wait_while_the_other_end_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.open("slow", ours, End())
    channel.note("double", Column(np.zeros(10_000_000, np.int8)))
    await asyncio.sleep(0)
    call = asyncio.create_task(channel.call("count", result=int, deadline_s=DEADLINE_S))
    await asyncio.sleep(0)
    assert len(channel._waiting) == 0, "it has not been sent"
    slow = await Channel.open("ours", theirs, End())
    assert await call == 0
    channel.close()
    slow.close()


async def test_a_process_that_is_killed_ends_what_waits_for_it(tmp_path: Path) -> None:
    with (tmp_path / "peer.log").open("ab") as log:
        process, connection = spawn([PEER], log)
    channel = await Channel.open("peer", connection, End())
    assert await channel.call("add", 2, 3, result=int, deadline_s=DEADLINE_S) == 5
    call = asyncio.create_task(channel.call("never", result=int, deadline_s=DEADLINE_S))
    assert await channel.call("add", 1, 1, result=int, deadline_s=DEADLINE_S) == 2
    kill_group(process)
    with pytest.raises(ChannelClosedError):
        await call
