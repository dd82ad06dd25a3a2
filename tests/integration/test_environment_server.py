"""A real environment server: it plays the same episodes, outlives its clients and loses no session but by a crash."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from agentrl import codec
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.connection import websocket_url
from agentrl.envs.definition import load_environment
from agentrl.envs.hosting import build_host
from agentrl.envs.remote import RemoteHost
from agentrl.orchestration.transcripts import Teacher
from agentrl.testing.tiny import tiny_chat
from agentrl.types.environment import Origin, Recovery
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Limits, Split, Task
from agentrl_scaffolds.tool_calling import ToolCalling
from tests.servers.environments import COMMAND, TOKEN, RunningServer, environment_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
LIMITS = Limits(8, 4096, 512, 60.0, 120.0)
VARIABLE = "SERVER_TOKEN"
FAULTY = "agentrl.testing.environments:faulty"
RAISING = "tests.servers.environments:raising"
LIVING = "agentrl.testing.durable_environments:living"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    options = f'{{"{LIVING}": {{"folder": "{folder}"}}, "{RAISING}": {{"fault": "raise", "at": "step"}}}}'
    with environment_server(folder, "sql", FAULTY, LIVING, RAISING, "--options", options, "--workers", "2") as running:
        yield running


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)


async def remote(server: RunningServer, name: str, folder: Path) -> RemoteHost:
    config = EnvironmentConfig(name=name, placement="remote", servers=(server.url,), token_variable=VARIABLE)
    host = await build_host(config, 300.0, folder)
    assert isinstance(host, RemoteHost)
    return host


def request(server: RunningServer, path: str, body: object = None, token: str = TOKEN):
    """Status, body and headers of an HTTP request."""
    data = None if body is None else codec.to_json(body)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers)) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def kill_all(server: RunningServer) -> None:
    """Kill all processes of a server once there are two."""
    until = time.monotonic() + PATIENCE_S
    while len(found := server.workers()) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def calls(*names: str) -> Message:
    return Message(Role.ASSISTANT, "", tuple(ToolCall(name, "query", {"sql": name}) for name in names))


async def test_episodes_are_the_same_inline_in_a_process_and_on_a_server(server, tiny_model, tmp_path) -> None:
    definition = load_environment("sql")
    options, chat = definition.parse_options({}), tiny_chat(tiny_model)
    hosts = {
        "inline": await build_host(EnvironmentConfig(name="sql", placement="inline"), 60.0, tmp_path),
        "process": await build_host(EnvironmentConfig(name="sql"), 60.0, tmp_path),
        "remote": await remote(server, "sql", tmp_path),
    }
    played, tasks = {}, {}
    for name, host in hosts.items():
        tasks[name] = codec.encode(await host.sample(Split.TRAIN, 0, range(6)))
        episodes = await Teacher(definition, options, host, ToolCalling(), LIMITS).play("clumsy", chat, range(6), 0)
        played[name] = codec.encode(
            [(e.reward, e.metrics, e.stop_reason, [(n.parent, n.token_ids) for n in e.nodes]) for e in episodes]
        )
        await host.close()
    assert tasks["inline"] == tasks["process"] == tasks["remote"]
    assert played["inline"] == played["process"] == played["remote"]


async def test_failures_are_the_same_in_a_process_and_on_a_server(server, tmp_path) -> None:
    host = await remote(server, RAISING, tmp_path)
    options = {"fault": "raise", "at": "step"}
    local = await build_host(EnvironmentConfig(name=RAISING, options=options), 60.0, tmp_path)
    failures = []
    for where in (local, host):
        async with where.open(Task("faulty", Split.TRAIN, 0)) as environment:
            with pytest.raises(EpisodeError) as caught:
                await environment.step(calls("x"))
            failures.append(caught.value.failure)
            assert (await environment.score()).reward == 1.0
        await where.close()
    assert failures[0].boundary == "environment"
    assert [(f.kind, f.message) for f in failures[1:]] == [(f.kind, f.message) for f in failures[:1]]


async def test_a_session_outlives_its_client_and_belongs_to_the_newest_holder(server, tmp_path) -> None:
    task = Task("lasting", Split.TRAIN, 0)
    first, second = await remote(server, LIVING, tmp_path), await remote(server, LIVING, tmp_path)
    assert first.description.recovery == Recovery(has_handles=True)
    async with first.open(task) as old:
        await old.start()
        result = await old.step(calls("a", "b"))
        async with second.open(task, Origin(handle=await old.handle(), token=3)) as new:
            assert await new.outcome(0, ["a", "b"]) == result
            assert await new.outcome(1, ["c"]) is None
            with pytest.raises(EpisodeError, match=r"environment\(fenced\).*held under token 3, which is above 0"):
                await old.step(calls("c"))
            await new.step(calls("c"))
            assert (await new.score()).metrics == {"steps": 2.0}
    await first.close()
    await second.close()


async def test_a_call_for_a_session_reaches_the_process_that_has_it(server, tmp_path) -> None:
    host = await remote(server, FAULTY, tmp_path)
    opened = set()
    async with asyncio.timeout(PATIENCE_S):
        while len(opened) < 2:  # until both processes have had one
            body = {"environment": FAULTY, "task": Task("faulty", Split.TRAIN, 0), "request_id": os.urandom(4).hex()}
            status, answer, _ = await asyncio.to_thread(request, server, "/sessions", body)
            assert status == 201
            handle = codec.from_json(answer, dict)["session"]
            opened.add(handle[0])
            async with host.open(
                Task("faulty", Split.TRAIN, 0), Origin(handle=f"{server.url}/sessions/{handle}")
            ) as it:
                assert (await it.step(calls("x"))).messages[0].tool_call_id == "x"
    await host.close()


async def test_a_repeated_request_by_http_acts_once(server) -> None:
    body = {"environment": FAULTY, "task": Task("faulty", Split.TRAIN, 0), "request_id": "open-once"}
    answers = [await asyncio.to_thread(request, server, "/sessions", body) for _ in range(4)]
    assert {status for status, _, _ in answers} == {201}
    [handle] = {codec.from_json(answer, dict)["session"] for _, answer, _ in answers}
    step = {"request_id": "1", "action": calls("x")}
    steps = [await asyncio.to_thread(request, server, f"/sessions/{handle}/step", step) for _ in range(3)]
    assert len({answer for _, answer, _ in steps}) == 1
    status, answer, _ = await asyncio.to_thread(request, server, f"/sessions/{handle}/outcome", {"step": 1})
    assert (status, answer) == (200, b"null"), "one step was carried out"
    assert (await asyncio.to_thread(request, server, f"/sessions/{handle}/close", {}))[0] == 200
    assert (await asyncio.to_thread(request, server, f"/sessions/{handle}/start", {}))[0] == 404


async def test_a_process_that_dies_is_replaced_and_its_sessions_are_lost(server, tmp_path) -> None:
    host = await remote(server, FAULTY, tmp_path)
    task = Task("faulty", Split.TRAIN, 0)
    before = server.workers()
    async with host.open(task) as environment:
        await environment.start()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EpisodeError, match=r"environment\(lost\)"):
            await environment.step(calls("x"))
    for _ in range(3):  # nor is it given up when those that are to take their place die, too
        await asyncio.to_thread(kill_all, server)
    async with host.open(task) as environment:
        assert (await environment.step(calls("x"))).messages[0].tool_call_id == "x"
    assert not set(before) & set(server.workers())
    await host.close()
    _, page, _ = await asyncio.to_thread(request, server, "/metrics")
    counted = dict(line.rsplit(" ", 1) for line in page.decode().splitlines() if line[0] != "#")
    assert float(counted["agentrl_env_restarts_total"]) >= 2
    assert float(counted["agentrl_env_lost_total"]) >= 1


async def test_what_is_asked_wrongly_is_told_in_one_line(server, tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"this server has no environment 'sqll'; it has sql, "):
        await remote(server, "sqll", tmp_path)
    monkeypatch.setenv(VARIABLE, "wrong")
    with pytest.raises(ConfigError, match="wants another token"):
        await remote(server, "sql", tmp_path)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=f"the variable {VARIABLE} is not set"):
        await remote(server, "sql", tmp_path)
    status, answer, headers = await asyncio.to_thread(request, server, "/environments", None, "wrong")
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert b"--token-file" in answer
    assert (await asyncio.to_thread(request, server, "/health", None, "wrong"))[0] == 200


async def test_a_message_of_100_mb_is_refused_by_client_and_server(server, tmp_path) -> None:
    host = await remote(server, FAULTY, tmp_path)
    huge = Message(Role.ASSISTANT, "x" * 100 * 2**20)
    async with host.open(Task("faulty", Split.TRAIN, 0)) as environment:
        with pytest.raises(EpisodeError, match=r"too_large.*greater --max-message-mb"):
            await environment.step(huge)
        assert (await environment.start()).messages[0].content == "count", "the session goes on"
    await host.close()
    async with connect(websocket_url(server.url), additional_headers={"authorization": f"Bearer {TOKEN}"}) as socket:
        await socket.recv()  # its first words
        with pytest.raises(ConnectionClosed, match="1009"):
            await asyncio.gather(socket.send("x" * 100 * 2**20), socket.recv())
    connection = HTTPConnection(server.url.removeprefix("http://"))
    connection.request("POST", "/sessions", headers={"authorization": f"Bearer {TOKEN}", "content-length": "104857600"})
    answer = connection.getresponse()
    assert (answer.status, b"greater --max-message-mb" in answer.read()) == (413, True)
    connection.close()


async def test_a_server_that_is_to_stop_takes_no_sessions_and_waits_for_those_that_live(tmp_path) -> None:
    with environment_server(tmp_path, FAULTY, "--drain-s", "600") as running:
        host = await remote(running, FAULTY, tmp_path)
        async with host.open(Task("faulty", Split.TRAIN, 0)) as environment:
            stopping = asyncio.create_task(asyncio.to_thread(running.stop))
            async with asyncio.timeout(PATIENCE_S):
                while (await asyncio.to_thread(request, running, "/health"))[0] != 503:
                    await asyncio.sleep(0.02)
            body = {"environment": FAULTY, "task": Task("faulty", Split.TRAIN, 0)}
            status, _, headers = await asyncio.to_thread(request, running, "/sessions", body)
            assert (status, headers["retry-after"]) == (503, "1")
            assert (await environment.step(calls("x"))).messages[0].tool_call_id == "x"
            assert not stopping.done()
        assert await stopping == 0
        await host.close()


def test_a_session_that_nobody_uses_ends_by_itself(tmp_path) -> None:
    with environment_server(tmp_path, FAULTY, "--idle-s", "0.5") as running:
        body = {"environment": FAULTY, "task": Task("faulty", Split.TRAIN, 0)}
        handle = codec.from_json(request(running, "/sessions", body)[1], dict)["session"]
        until = time.monotonic() + PATIENCE_S
        while b"agentrl_env_reaped_total 1.0" not in request(running, "/metrics")[1]:
            assert time.monotonic() < until
            time.sleep(0.05)
        status, answer, _ = request(running, f"/sessions/{handle}/start", {})
    assert (status, b"nobody used it for 0.5 s" in answer) == (404, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "'nowhere'"),
        (("no_such_module:definition",), "cannot be loaded"),
        (("sql", "--host", "0.0.0.0"), "--host 0.0.0.0 is reached by others"),
        (("sql", "--options", '{"no": 1}'), "options of environment 'sql'"),
        (("sql", "facts", "--options", '{"slq": {}}'), "--options names slq"),
        (("sql", "--token-file", "nowhere"), "--token-file nowhere cannot be read"),
    ],
)
def test_a_server_that_cannot_start_says_why_and_what_to_do(arguments: tuple[str, ...], says: str) -> None:
    ended = subprocess.run([*COMMAND, *arguments, "--port", "0"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    [line, *_] = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_port_of_somebody_else_is_named(server) -> None:
    port = server.url.rpartition(":")[2]
    ended = subprocess.run([*COMMAND, "sql", "--port", port], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr.startswith(f"error: port {port} of 127.0.0.1 cannot be had")) == (1, True)
