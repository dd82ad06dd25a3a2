"""The client of OpenEnv's protocol against a server that sends what it is told, frame by frame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Response

from agentrl.envs.openenv import OpenEnvEnvironment, OpenEnvOptions, definition
from agentrl.process.ports import free_port
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split, Task

SCHEMA = {
    "title": "EchoAction",
    "properties": {"metadata": {"type": "object"}, "word": {"type": "string"}},
    "required": ["word"],
    "additionalProperties": False,
}
TASK = Task("openenv", Split.TRAIN, 0, {"seed": 7})
LONG_S = 120.0
FULL = {"type": "error", "data": {"message": "1 of 1", "code": "CAPACITY_REACHED", "active_sessions": 1}}
Script = Callable[[ServerConnection], Awaitable[None]]


def observation(word: str, reward: object = None, done: bool = False) -> str:
    data = {"observation": {"word": word, "metadata": {}}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def calling(*words: str) -> Message:
    calls = tuple(ToolCall(f"call-{place}", "act", {"word": word}) for place, word in enumerate(words))
    return Message(Role.ASSISTANT, tool_calls=calls)


async def echo(connection: ServerConnection) -> None:
    """Answer as a server does: the seed, then every word with its length."""
    async for text in connection:
        frame = json.loads(text)
        if frame["type"] == "reset":
            await connection.send(observation(f"seed {frame['data']['seed']}"))
        else:
            await connection.send(observation(frame["data"]["word"], float(len(frame["data"]["word"]))))


@asynccontextmanager
async def playing(script: Script, schema: str = json.dumps({"action": SCHEMA}), status: int = 200, **options):
    """An environment whose server follows the script with every connection."""

    def answer(connection, request):
        if request.path == "/schema":
            return Response(status, "", Headers({"Content-Length": str(len(schema))}), schema.encode())
        return None

    async with serve(script, "127.0.0.1", 0, process_request=answer, close_timeout=1) as server:
        port = server.sockets[0].getsockname()[1]
        environment = OpenEnvEnvironment(OpenEnvOptions(url=f"http://127.0.0.1:{port}/", **options), TASK)
        try:
            yield environment
        finally:
            await environment.close()


async def test_calls_of_one_message_are_steps_in_order_and_none_is_sent_behind_the_end():
    seen = []

    async def ends_at_stop(connection):
        await connection.recv()
        await connection.send(observation("go"))
        while True:
            seen.append(json.loads(await connection.recv()))
            word = seen[-1]["data"]["word"]
            await connection.send(observation(word, done=word == "stop"))

    async with playing(ends_at_stop) as environment:
        await environment.start()
        result = await environment.step(calling("a", "stop", "b"))
    assert [m.content for m in result.messages] == ["a", "stop", "error: the episode is over"]
    assert result.is_done
    assert seen == [{"type": "step", "data": {"word": "a"}}, {"type": "step", "data": {"word": "stop"}}]


async def test_an_answer_to_a_cancelled_step_is_not_taken_for_that_of_the_next():
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def late(connection):
        await connection.recv()
        await connection.send(observation("go"))
        for _ in range(2):
            word = json.loads(await connection.recv())["data"]["word"]
            asked.set()
            await may_answer.wait()
            await connection.send(observation(word, 1.0))

    async with playing(late) as environment:
        await environment.start()
        first = asyncio.create_task(environment.step(calling("first")))
        await asked.wait()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        second = asyncio.create_task(environment.step(calling("second")))
        may_answer.set()
        assert [m.content for m in (await second).messages] == ["second"]


async def test_an_answer_behind_the_deadline_is_never_read():
    async def late(connection):
        await connection.recv()
        await connection.send(observation("go"))
        await connection.recv()
        with suppress(Exception):
            await connection.wait_closed()
            await connection.send(observation("late", 1.0))

    async with playing(late) as environment:
        await environment.start()
        environment._socket._call_s = 0.5
        with pytest.raises(EpisodeError, match=r"timeout\(environment.step\): .* has not answered within 0.5 s"):
            await environment.step(calling("hello"))
        with pytest.raises(EpisodeError, match=r"environment\(lost\)"):
            await environment.step(calling("hello"))


async def test_a_place_on_a_full_server_is_waited_for_and_counted():
    connections = []

    async def full_twice(connection):
        connections.append(connection)
        if len(connections) < 3:
            await connection.send(json.dumps(FULL))  # and closes, as OpenEnv's server does, before it is asked
        else:
            await echo(connection)

    async with playing(full_twice, full_s=LONG_S) as environment:
        opening = await environment.start()
        assert opening.messages[-1].content == "seed 7"
        assert (await environment.score()).metrics["openenv_waits"] == 2


async def test_a_server_that_stays_full_is_named_with_the_remedy():
    async def full(connection):
        await connection.send(json.dumps(FULL))

    async with playing(full, full_s=0.0) as environment:
        with pytest.raises(EpisodeError, match=r"environment\(capacity\): .* is full: 1 of 1; raise its limit"):
            await environment.start()


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR"])
async def test_a_session_that_cannot_be_made_says_why(code):
    async def broken(connection):
        await connection.send(json.dumps({"type": "error", "data": {"message": "no database", "code": code}}))

    async with playing(broken) as environment:
        with pytest.raises(EpisodeError, match=r"environment\(create\): .*no database"):
            await environment.start()


@pytest.mark.parametrize(
    ("rewards", "total"), [([True, False], 1.0), ([None, 0.25], 0.25), ([None, None], None), ([2, 0.5], 2.5), ([], 0.0)]
)
async def test_the_reward_is_the_sum_of_those_that_were_given(rewards, total):
    async def rewarding(connection):
        await connection.recv()
        await connection.send(observation("go", 5.0))
        for reward in rewards:
            await connection.recv()
            await connection.send(observation("", reward))
        await connection.wait_closed()

    async with playing(rewarding) as environment:
        await environment.start()
        for _ in rewards:
            await environment.step(calling("x"))
        assert (await environment.score()).reward == total


@pytest.mark.parametrize(
    "frame", ["no json", '{"type":"observation","data":{"reward":1}}', observation("x", "1"), '{"type":"state"}']
)
async def test_a_frame_of_another_protocol_fails_the_episode(frame):
    async def speaks_otherwise(connection):
        await connection.recv()
        await connection.send(frame)
        await connection.wait_closed()

    async with playing(speaks_otherwise) as environment:
        with pytest.raises(EpisodeError, match=r"environment\(protocol\)"):
            await environment.start()


@pytest.mark.parametrize(
    ("schema", "status", "why"), [("", 404, "answers 404"), ("<html>", 200, "none of OpenEnv's"), ("{}", 200, "action")]
)
async def test_a_server_of_another_protocol_is_named_with_the_remedy(schema, status, why):
    async with playing(echo, schema, status) as environment:
        with pytest.raises(EpisodeError, match=rf"environment\(create\): .*{why}.*give the base URL of an OpenEnv"):
            await environment.start()


async def test_a_url_where_nobody_listens_is_named_with_the_remedy():
    environment = OpenEnvEnvironment(OpenEnvOptions(url=f"http://127.0.0.1:{free_port()}"), TASK)
    with pytest.raises(EpisodeError, match=r"no session at .*give the base URL of an OpenEnv server"):
        await environment.start()


async def test_the_token_is_sent_and_one_that_is_not_set_is_named(monkeypatch):
    seen = []

    async def remembers(connection):
        seen.append(connection.request.headers.get("Authorization"))
        await echo(connection)

    monkeypatch.setenv("ECHO_TOKEN", "secret")
    async with playing(remembers, token_variable="ECHO_TOKEN") as environment:
        await environment.start()
    assert seen == ["Bearer secret"]
    monkeypatch.delenv("ECHO_TOKEN")
    with pytest.raises(ValueError, match="ECHO_TOKEN is not set"):
        OpenEnvEnvironment(OpenEnvOptions(url="http://x", token_variable="ECHO_TOKEN"), TASK)


def test_tasks_are_seeds_or_the_rows_of_a_file(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"level": level}) + "\n" for level in range(10)))
    seeds, rows = OpenEnvOptions(url="http://x"), OpenEnvOptions(url="http://x", tasks=file)
    drawn = [definition.sample_task(seeds, Split.TRAIN, ordinal, 0).payload["seed"] for ordinal in range(20)]
    assert len(set(drawn)) == 20
    levels = {definition.sample_task(rows, Split.TRAIN, place, 0).payload["level"] for place in range(9)}
    held = definition.sample_task(rows, Split.HELDOUT, 0, 0).payload["level"]
    assert (definition.describe(rows).num_tasks, len(levels), held in levels) == (9, 9, False)
