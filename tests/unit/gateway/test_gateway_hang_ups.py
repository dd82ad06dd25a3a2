"""Clients that hang up just as they, or others, ask the same: nothing is drawn twice, and no answer goes to another.

Each is a bare socket, so that it is the test that says what the gateway learns, and when.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import uvloop
from gateway_parts import ASKED, Held, play, raw, script

from agentrl.gateway import calls, connections
from agentrl.gateway.chat import ChatDialect
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.types.message import Message, Role

STREAMED = {**ASKED, "stream": True}
LONG = Message(Role.ASSISTANT, "count " * 80_000)
MANY = 100_000
HELD_UP_S = 0.6


@pytest.fixture(scope="session")
def chat(tiny_model):
    return tiny_chat(tiny_model)


@pytest.fixture(autouse=True)
def begun() -> Iterator[mock.Mock]:
    """Is called when the gateway begins to look whether a call is a new one."""
    with mock.patch.object(calls, "_name_of", wraps=calls._name_of) as name_of:
        yield name_of


async def until_begun(begun: mock.Mock, number: int) -> None:
    while begun.call_count < number:
        await asyncio.sleep(0)


def hold_up() -> None:
    """Keep the loop from everything else, longer than any moment that the gateway waits."""
    time.sleep(HELD_UP_S)


class Caller:
    """A client that has asked."""

    def __init__(self, access, body: dict, by_path: bool = False) -> None:
        if by_path:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(access.socket)
        else:
            self.socket = socket.create_connection(("127.0.0.1", int(access.url.rpartition(":")[2])))
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {access.key}\r\n"
        self.socket.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        self.socket.setblocking(False)
        self._is_streamed = "stream" in body

    async def hear(self) -> str:
        """The whole answer's id."""
        heard = b""
        while not heard.endswith(b"0\r\n\r\n" if self._is_streamed else b"}"):
            heard += await asyncio.get_running_loop().sock_recv(self.socket, 65536)
        return heard.partition(b'"id":"')[2].partition(b'"')[0].decode()

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_loss_that_is_learnt_behind_the_call_that_is_sent_again_is_known_all_the_same(chat, begun, streams):
    async def agent(access):
        asked = STREAMED if streams else ASKED
        first = Caller(access, asked)
        answer = await first.hear()
        again = Caller(access, asked)
        await until_begun(begun, 2)
        if streams:
            first.socket.close()
        else:
            first.reset()
        assert await again.hear() == answer
        again.socket.close()

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), episode.counts["sent_again"]) == (1, 1)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_loop_that_was_held_up_for_longer_than_a_moment_still_learns_who_hung_up(chat, begun, run):
    engine = Held(chat)

    async def agent(access):
        first = Caller(access, ASKED)
        await until_begun(begun, 1)
        again = Caller(access, ASKED)
        await until_begun(begun, 2)
        first.socket.close()
        hold_up()
        engine.may_answer.set()
        await again.hear()
        again.socket.close()

    episode = run(play(chat, engine, agent))
    assert (len(episode.turns), episode.counts["sent_again"]) == (1, 1)


async def test_of_two_retries_the_one_that_has_hung_up_takes_nothing_from_the_other(chat, begun):
    engine = Held(chat)

    async def agent(access):
        callers = []
        for number in (1, 2, 3):
            callers.append(Caller(access, ASKED))
            await until_begun(begun, number)
        for gone in callers[:2]:
            gone.socket.close()
        hold_up()
        engine.may_answer.set()
        await callers[2].hear()
        callers[2].socket.close()

    episode = await play(chat, engine, agent)
    assert (len(episode.turns), episode.counts["sent_again"]) == (1, 1)


async def test_nothing_is_drawn_for_who_hangs_up_before_it_is_known_whether_its_call_is_new(chat, begun):
    engine = Held(chat)

    async def agent(access):
        other = Caller(access, ASKED)
        await until_begun(begun, 1)
        gone = Caller(access, ASKED)
        await until_begun(begun, 2)
        gone.socket.close()
        again = Caller(access, ASKED)
        await until_begun(begun, 3)
        hold_up()
        engine.may_answer.set()
        assert await other.hear() != await again.hear()
        for caller in (other, again):
            caller.socket.close()

    episode = await play(chat, engine, agent)
    assert (len(episode.turns), "sent_again" in episode.counts) == (2, False)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_answer_to_who_has_closed_before_it_was_written_is_given_again(chat, run):
    callers, gone = [], []
    build = ChatDialect.answer

    def answer(*arguments):
        while callers:
            gone.append(callers.pop())
            gone[0].socket.shutdown(socket.SHUT_WR)  # as a relay tells of a client that is gone
        return build(*arguments)

    async def agent(access):
        callers.append(Caller(access, ASKED))
        with mock.patch.object(ChatDialect, "answer", answer):
            assert (await raw(access, "/v1/chat/completions", ASKED)).status_code == 200
        gone[0].socket.close()

    episode = run(play(chat, ScriptedEngine(chat, script), agent))
    assert (len(episode.turns), episode.counts["sent_again"], "unheard" in episode.counts) == (1, 1, False)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_was_not_sent_to_its_end_is_given_again(chat, streams):
    async def agent(access):
        first = Caller(access, STREAMED if streams else ASKED, by_path=True)
        # More than this waits for who does not read.
        while not select.select([first.socket], [], [], 0)[0] or len(first.socket.recv(MANY, socket.MSG_PEEK)) < MANY:
            await asyncio.sleep(0)
        first.socket.shutdown(socket.SHUT_WR)
        assert (await raw(access, "/v1/chat/completions", ASKED)).status_code == 200
        first.socket.close()

    engine = ScriptedEngine(chat, lambda *_: LONG)
    episode = await play(chat, engine, agent, max_reply_tokens=160_000, max_context_tokens=200_000)
    assert (len(episode.turns), episode.counts["sent_again"]) == (1, 1)


async def test_who_closes_an_idle_connection_has_heard_its_stream_and_another_gets_an_answer_of_its_own(chat):
    async def agent(access):
        with mock.patch.object(connections, "_IDLE_TURNS", 0):
            first = Caller(access, STREAMED)
            answer = await first.hear()
            first.socket.close()
            again = Caller(access, STREAMED)
            assert await again.hear() != answer
            again.socket.close()

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), "sent_again" in episode.counts) == (2, False)


async def test_the_same_asked_beside_a_connection_that_is_kept_is_another_call(chat):
    async def agent(access):
        callers = [Caller(access, ASKED)]
        answers = [await callers[0].hear()]
        callers.append(Caller(access, ASKED))
        answers.append(await callers[1].hear())
        assert answers[0] != answers[1]
        for caller in callers:
            caller.socket.close()

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), "sent_again" in episode.counts) == (2, False)
