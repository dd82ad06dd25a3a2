from __future__ import annotations

import asyncio
import itertools
import socket

import hypothesis.strategies as st
from hypothesis import given

from agentrl.engine.link import Kind, Link, Message, encoded, take_messages

messages = st.builds(
    Message, st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.text(max_size=20), st.binary(max_size=50)
)


@given(st.lists(messages, max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_messages_come_out_as_they_went_in_wherever_the_bytes_are_cut(said: list[Message], cuts: list[int]) -> None:
    data = b"".join(piece for message in said for piece in encoded(message))
    received, heard = bytearray(), []
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        received += data[start:end]
        heard += take_messages(received)
    assert heard == said
    assert not received


async def test_an_end_that_is_gone_is_told_of_and_spoken_to_in_vain() -> None:
    ours, theirs = socket.socketpair()
    heard: asyncio.Queue[Message] = asyncio.Queue()
    is_over = asyncio.Event()
    one, other = Link(heard.put_nowait, is_over.set), Link(heard.put_nowait, lambda: None)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: one, sock=ours)
    await loop.create_unix_connection(lambda: other, sock=theirs)
    async with asyncio.timeout(5):
        one.send(Message(Kind.CALL, 1, "GET /health"))
        assert (await heard.get()).note == "GET /health"
        other.send(Message(Kind.ANSWER, 1, "200", b"{}"))
        other.close()
        assert (await heard.get()).body == b"{}"
        await is_over.wait()
    one.send(Message(Kind.HANGUP, 1))
    one.close()
