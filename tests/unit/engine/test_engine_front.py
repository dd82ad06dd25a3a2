from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrl.engine.front import Front
from agentrl.engine.link import Kind, Link, Message

_DEADLINE_S = 5.0
SCOPE = {"type": "http", "method": "POST", "path": "/generate", "headers": [(b"authorization", b"Bearer secret")]}
GONE = {"type": "http.disconnect"}


class Client:
    """One HTTP client as a server shows it to an application; takes responses only while it reads."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for event in events:
            self.events.put_nowait(event)
        self.got: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, event: dict[str, Any]) -> None:
        await self.reads.wait()
        self.got.append(event)


class Side:
    """A front whose engine is a test."""

    def __init__(self) -> None:
        self.front = Front(lambda: None)
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.link = Link(self.heard.put_nowait, lambda: None)

    def start(self, client: Client) -> asyncio.Task[None]:
        return asyncio.create_task(self.front(SCOPE, client.events.get, client.send))

    async def next(self) -> Message:
        async with asyncio.timeout(_DEADLINE_S):
            return await self.heard.get()

    async def answered(self, task: asyncio.Task[None]) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            await task


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    side = Side()
    loop = asyncio.get_running_loop()
    for link, end in zip((side.front.link, side.link), socket.socketpair(), strict=True):
        await loop.create_unix_connection(lambda link=link: link, sock=end)
    yield side
    side.link.close()
    side.front.link.close()


def _body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_call_reaches_the_engine_whole_and_its_answer_the_client(side: Side) -> None:
    client = Client(_body(b'{"a":', more=True), _body(b"1}"))
    task = side.start(client)
    call = await side.next()
    assert (call.kind, call.note, call.body) == (Kind.CALL, "Bearer secret\nPOST /generate", b'{"a":1}')
    side.link.send(Message(Kind.ANSWER, call.call, "400", b'{"error":1}'))
    await side.answered(task)
    start, body = client.got
    assert start["status"] == 400
    assert (b"content-length", b"11") in start["headers"]
    assert body["body"] == b'{"error":1}'


async def test_answers_go_to_their_own_calls_in_any_order(side: Side) -> None:
    clients = [Client(_body(b"%d" % number)) for number in range(3)]
    tasks = [side.start(client) for client in clients]
    calls = [await side.next() for _ in clients]
    for call in reversed(calls):
        side.link.send(Message(Kind.ANSWER, call.call, "200", call.body))
    for task in tasks:
        await side.answered(task)
    assert [client.got[1]["body"] for client in clients] == [b"0", b"1", b"2"]


async def test_a_client_that_is_gone_before_its_body_is_whole_costs_the_engine_nothing(side: Side) -> None:
    await side.answered(side.start(Client(_body(b"{", more=True), GONE)))
    later = side.start(Client(_body(b"later")))
    call = await side.next()
    assert call.body == b"later"
    side.link.send(Message(Kind.ANSWER, call.call, "200"))
    await side.answered(later)


async def test_the_engine_hears_of_a_client_that_hangs_up(side: Side) -> None:
    task = side.start(Client(_body(b"{}"), GONE))
    call, hangup = await side.next(), await side.next()
    assert (hangup.kind, hangup.call) == (Kind.HANGUP, call.call)
    side.link.send(Message(Kind.ANSWER, call.call, "200"))
    await side.answered(task)


async def test_an_error_behind_pieces_is_an_event_like_them(side: Side) -> None:
    client = Client(_body(b"{}"))
    task = side.start(client)
    call = await side.next()
    side.link.send(Message(Kind.PIECE, call.call, body=b"data: 1\n\n"))
    assert (await side.next()).kind is Kind.TAKEN
    side.link.send(Message(Kind.ANSWER, call.call, "500", b'{"error":1}'))
    await side.answered(task)
    assert [event["body"] for event in client.got[1:]] == [b"data: 1\n\n", b'data: {"error":1}\n\n']


async def test_a_piece_counts_as_taken_when_the_client_has_taken_it(side: Side) -> None:
    client = Client(_body(b"{}"))
    task = side.start(client)
    call = await side.next()
    client.reads.clear()
    side.link.send(Message(Kind.PIECE, call.call, body=b"data: 1\n\n"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert side.heard.empty()
    client.reads.set()
    assert await side.next() == Message(Kind.TAKEN, call.call)
    side.link.send(Message(Kind.ANSWER, call.call, "200"))
    await side.answered(task)
    assert [event.get("body") for event in client.got] == [None, b"data: 1\n\n", b""]
    assert client.got[0]["headers"][0][1].startswith(b"text/event-stream")
