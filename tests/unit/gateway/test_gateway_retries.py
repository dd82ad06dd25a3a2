"""Calls that are sent again, or look like it: each is answered once."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import httpx
import pytest
from gateway_parts import ASKED, Held, client, play, raw, script

from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import tiny_chat


@pytest.fixture(scope="session")
def chat(tiny_model):
    return tiny_chat(tiny_model)


async def test_a_call_that_is_sent_again_is_answered_once(chat):
    async def agent(access):
        first = await raw(access, "/v1/chat/completions", ASKED)
        again = await raw(access, "/v1/chat/completions", ASKED, {"x-stainless-retry-count": "1"})
        assert again.json() == first.json()
        keyed = [await raw(access, "/v1/chat/completions", ASKED, {"idempotency-key": "k"}) for _ in range(2)]
        assert keyed[0].json() == keyed[1].json() != first.json()

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), episode.counts["sent_again"]) == (2, 2)


async def test_the_same_call_without_a_sign_of_a_retry_is_another_call(chat):
    async def agent(access):
        first, second = [await raw(access, "/v1/chat/completions", ASKED) for _ in range(2)]
        assert first.json()["id"] != second.json()["id"]

    assert len((await play(chat, ScriptedEngine(chat, script), agent)).turns) == 2


async def test_two_sub_agents_may_ask_the_same_at_once(chat):
    engine = Held(chat)

    async def agent(access):
        calls = [asyncio.create_task(raw(access, "/v1/chat/completions", ASKED)) for _ in range(2)]
        while engine.num_asked < 2:
            await asyncio.sleep(0)
        engine.may_answer.set()
        answers = [answer.json()["id"] for answer in await asyncio.gather(*calls)]
        assert answers[0] != answers[1]

    episode = await play(chat, engine, agent)
    assert (len(episode.turns), "sent_again" in episode.counts) == (2, False)
    assert [node.parent for node in episode.nodes] == [None, 0, 0]


async def test_of_two_sub_agents_that_asked_the_same_each_gets_its_own_reply_again(chat):
    async def agent(access):
        first = {"x-claude-code-agent-id": "a"}, {"x-claude-code-agent-id": "b"}
        answers = [(await raw(access, "/v1/chat/completions", ASKED, name)).json()["id"] for name in first]
        again = [{**name, "x-stainless-retry-count": "1"} for name in first]
        assert [(await raw(access, "/v1/chat/completions", ASKED, name)).json()["id"] for name in again] == answers

    assert len((await play(chat, ScriptedEngine(chat, script), agent)).turns) == 2


RETRY = {"x-stainless-retry-count": "1"}


async def test_of_two_who_ask_the_same_the_one_that_hung_up_gets_its_own_reply_and_not_the_others(chat):
    engine = Held(chat)

    async def agent(access):
        calls = []
        for number in (1, 2):
            calls.append(asyncio.create_task(raw(access, "/v1/chat/completions", ASKED)))
            while engine.num_asked < number:
                await asyncio.sleep(0)
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        again = asyncio.create_task(raw(access, "/v1/chat/completions", ASKED, RETRY))
        engine.may_answer.set()
        assert (await again).json()["id"] != (await calls[1]).json()["id"]

    episode = await play(chat, engine, agent)
    assert (len(episode.turns), episode.counts["sent_again"], "unheard" in episode.counts) == (2, 1, False)


async def test_a_retry_of_what_never_arrived_is_not_given_what_another_has_heard(chat):
    async def agent(access):
        async with client(access) as api:
            first = await api.chat.completions.create(**ASKED)
            again = await raw(access, "/v1/chat/completions", ASKED, RETRY)
            assert again.json()["id"] != first.id

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), "sent_again" in episode.counts) == (2, False)


async def test_who_loses_a_stream_and_asks_for_a_whole_answer_gets_the_same_reply(chat):
    engine = Held(chat)

    async def agent(access):
        first = asyncio.create_task(raw(access, "/v1/chat/completions", {**ASKED, "stream": True}))
        await engine.asked.wait()
        first.cancel()
        await asyncio.wait([first])
        engine.may_answer.set()
        await raw(access, "/v1/chat/completions", ASKED)

    assert len((await play(chat, engine, agent)).turns) == 1


async def break_off(access, body: object) -> None:
    """Ask for a stream and leave it in the middle."""
    async with httpx.AsyncClient(base_url=access.url, timeout=60) as http:
        headers = {"authorization": f"Bearer {access.key}"}
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            await anext(answer.aiter_raw())


async def test_who_leaves_a_stream_in_the_middle_and_asks_again_gets_the_same_reply_once(chat):
    streamed = {**ASKED, "stream": True}

    async def agent(access):
        await break_off(access, streamed)
        answers = [await raw(access, "/v1/chat/completions", ASKED) for _ in range(2)]
        assert answers[0].json()["id"] != answers[1].json()["id"]

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), episode.counts["sent_again"]) == (2, 1)


async def test_who_keeps_its_connection_behind_a_stream_has_heard_it_and_asks_the_same_anew(chat):
    async def agent(access):
        async with client(access) as api:
            for _ in range(2):
                stream = await api.chat.completions.create(**ASKED, stream=True)
                assert [chunk async for chunk in stream]

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), "sent_again" in episode.counts) == (2, False)


async def test_an_answer_whose_connection_was_reset_is_given_again(chat):
    """Claude Code says of no call that it is sent again."""

    async def agent(access):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(access.url.rpartition(":")[2]))
        body = json.dumps(ASKED).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {access.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.read(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        answer = await raw(access, "/v1/chat/completions", ASKED)
        assert answer.status_code == 200

    episode = await play(chat, ScriptedEngine(chat, script), agent)
    assert (len(episode.turns), episode.counts["sent_again"]) == (1, 1)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_who_hangs_up_and_asks_again_gets_the_reply_that_was_in_the_making(chat, streams):
    engine = Held(chat)
    asked = {**ASKED, "stream": streams}

    async def agent(access):
        first = asyncio.create_task(raw(access, "/v1/chat/completions", asked))
        await engine.asked.wait()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(raw(access, "/v1/chat/completions", asked))
        engine.may_answer.set()
        answer = await second
        assert answer.status_code == 200
        assert "I look." in answer.text.replace('","', "") or "look" in answer.text

    episode = await play(chat, engine, agent)
    assert len(episode.turns) == 1
    assert episode.counts["sent_again"] == 1
    assert "unheard" not in episode.counts


async def test_a_reply_that_nobody_hears_is_on_record_and_counted(chat):
    engine = Held(chat)

    async def agent(access):
        first = asyncio.create_task(raw(access, "/v1/chat/completions", ASKED))
        await engine.asked.wait()
        first.cancel()
        await asyncio.wait([first])
        engine.may_answer.set()
        await raw(access, "/v1/chat/completions", {**ASKED, "temperature": 0.5})

    episode = await play(chat, engine, agent)
    assert len(episode.turns) == 2
    assert (episode.counts["unheard"], episode.counts["overrides_temperature"]) == (1, 1)


async def _heard(asking) -> None:
    answer = await asking
    if hasattr(answer, "__aiter__"):
        assert [chunk async for chunk in answer]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_however_soon_replies_are_there_the_same_asked_many_times_at_once_is_as_many_calls(chat, streams):
    asked = {**ASKED, "stream": streams}

    async def agent(access):
        async with client(access) as api:
            chats = api.chat.completions
            await asyncio.gather(*(_heard(chats.create(**asked)) for _ in range(12)))

    episode = await play(chat, ScriptedEngine(chat, script), agent, max_turns=20)
    assert (len(episode.turns), "sent_again" in episode.counts) == (12, False)
