"""OpenEnv's protocol on our server, frame by frame as captured from OpenEnv's own, by Starlette's client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from agentrl.envs.inline import InlineHost
from agentrl.envs.wire import OpenEnv
from agentrl.serving.app import build_app
from agentrl.serving.board import Board
from agentrl.serving.openenv_named import OpenEnvSessions
from agentrl.serving.options import ServerOptions, SessionLimits
from agentrl.serving.table import SessionTable
from tests.servers.echo import EchoOptions
from tests.servers.echo import echo as echo_definition


def _broken(options, task):
    raise RuntimeError("no database")


BROKEN = replace(echo_definition, name="broken", create=_broken)


def table_of(definition=echo_definition, most: int = 10, board: Board | None = None) -> SessionTable:
    host = InlineHost(definition, EchoOptions(tasks=7), 60.0)
    return SessionTable({definition.name: host}, SessionLimits(most=most), board or Board(1))


@contextmanager
def serving_by(table: SessionTable, calls) -> Iterator[TestClient]:
    (name,) = table.hosts
    with TestClient(build_app(table, calls, ServerOptions({name: {}}, "."))) as client:
        client.table = table
        yield client


@contextmanager
def serving(most: int = 10, definition=echo_definition) -> Iterator[TestClient]:
    table = table_of(definition, most)
    with serving_by(table, table) as client:
        yield client


@pytest.fixture
def client() -> Iterator[TestClient]:
    with serving() as client:
        yield client


def ask(socket, frame):
    socket.send_json(frame)
    return socket.receive_json()


def call(word: str, **more):
    data = {"type": "call_tool", "tool_name": "echo", "arguments": {"word": word}, **more}
    return {"type": "step", "data": data}


def observed(observation, reward=None, done=False):
    data = {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def said(word: str, **more):
    return observed({"tool_name": "echo", "result": word, "error": None}, **more)


def error_of(frame):
    assert frame["type"] == "error", frame
    return frame["data"]["code"]


def test_an_episode_has_the_frames_of_openenv(client):
    with client.websocket_connect("/ws") as socket:
        opening = {"messages": [{"role": "user", "content": "task echo/train/3"}]}
        assert ask(socket, {"type": "reset", "data": {"split": "train", "index": 3}}) == observed(opening)
        assert ask(socket, call("hello")) == said("hello")
        assert ask(socket, call("more", metadata={"any": 1})) == said("more")
        state = ask(socket, {"type": "state"})
        assert (state["type"], state["data"]["step_count"]) == ("state", 2)
        assert ask(socket, call("stop")) == said("stop", reward=13.0, done=True)


def test_a_reset_needs_no_data_ignores_other_arguments_and_takes_the_episodes_name(client):
    with client.websocket_connect("/ws") as socket:
        assert ask(socket, {"type": "reset"})["type"] == "observation"
        named = {"type": "reset", "data": {"seed": 3, "episode_id": "mine", "difficulty": "hard"}}
        first = ask(socket, named)
        assert ask(socket, {"type": "state"})["data"] == {"episode_id": "mine", "step_count": 0}
        assert ask(socket, named) == first


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("{", "INVALID_JSON"),
        ('{"type":"dance"}', "UNKNOWN_TYPE"),
        ("[]", "VALIDATION_ERROR"),
        ('{"type":"step","data":{"wrod":"x"}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"type":"call_tool","tool_name":4}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":[]}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"seed":-1}}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":{"split":"all"}}', "VALIDATION_ERROR"),
        (
            '{"type":"step","data":{"type":"call_tool","tool_name":"echo","arguments":{"word":"fail"}}}',
            "EXECUTION_ERROR",
        ),
    ],
)
def test_what_is_wrong_is_told_by_its_code_and_the_session_goes_on(client, sent, code):
    with client.websocket_connect("/ws") as socket:
        ask(socket, {"type": "reset"})
        socket.send_text(sent)
        assert error_of(socket.receive_json()) == code
        assert ask(socket, {"type": "reset"})["type"] == "observation"
        assert ask(socket, call("hello")) == said("hello")


def test_a_step_acts_on_no_task_that_was_not_begun(client):
    with client.websocket_connect("/ws") as socket:
        assert error_of(ask(socket, call("hello"))) == "EXECUTION_ERROR"
        ask(socket, {"type": "reset"})
        ask(socket, call("stop"))
        assert error_of(ask(socket, call("hello"))) == "EXECUTION_ERROR"


def test_a_full_server_says_so_unasked_and_closes(client):
    with serving(most=1) as client, client.websocket_connect("/ws") as holder:
        ask(holder, {"type": "reset"})
        with client.websocket_connect("/ws") as refused:
            frame = refused.receive_json()
            assert error_of(frame) == "CAPACITY_REACHED"
            assert (frame["data"]["active_sessions"], frame["data"]["max_sessions"]) == (1, 1)
            refused.send_json({"type": "reset"})  # as a client does that has not read it yet
            with pytest.raises(WebSocketDisconnect):
                refused.receive_json()


def test_an_environment_that_cannot_be_made_ends_the_connection_with_its_name():
    with serving(definition=BROKEN) as client, client.websocket_connect("/ws") as socket:
        frame = ask(socket, {"type": "reset"})
        assert (error_of(frame), frame["data"]["factory_name"]) == ("FACTORY_ERROR", "broken")
        assert "no database" in frame["data"]["message"]
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()


def test_a_session_ends_with_its_reset_and_with_its_connection(client):
    with client.websocket_connect("/ws") as socket:
        for _ in range(3):
            ask(socket, {"type": "reset"})
            assert len(client.table) == 1
        socket.send_json({"type": "close"})
        with pytest.raises(WebSocketDisconnect) as end:
            socket.receive_json()
        assert end.value.code == 1000
    with client.websocket_connect("/ws") as socket:
        ask(socket, {"type": "reset"})
    assert len(client.table) == 0


def test_tools_are_listed_before_a_reset_and_reply_is_one_of_them(client):
    with client.websocket_connect("/ws") as socket:
        listed = ask(socket, {"type": "step", "data": {"type": "list_tools"}})
        tools = listed["data"]["observation"]["tools"]
        assert [(tool["name"], set(tool)) for tool in tools] == [
            (name, {"name", "description", "input_schema"}) for name in ("echo", "reply")
        ]
        ask(socket, {"type": "reset"})
        reply = {"type": "call_tool", "tool_name": "reply", "arguments": {"content": "four"}}
        data = ask(socket, {"type": "step", "data": reply})["data"]
        assert (data["reward"], data["done"]) == (4.0, True)


def test_a_message_without_a_call_is_what_the_agent_says(client):
    with client.websocket_connect("/ws") as socket:
        ask(socket, {"type": "reset"})
        spoken = ask(socket, {"type": "step", "data": {"type": "message", "content": "goodbye"}})
        assert spoken == observed({"messages": []}, reward=7.0, done=True)


def rpc(client, method, params=None, **more):
    request = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params or {}, **more}
    response = client.post("/mcp", json=request)
    assert response.status_code == 200
    assert response.json()["jsonrpc"] == "2.0"
    return response.json()


def test_tools_by_json_rpc_in_a_session_that_outlives_its_requests(client):
    session = rpc(client, "openenv/session/create")["result"]["session_id"]
    assert len(client.table) == 1
    (first, _) = rpc(client, "tools/list", {"session_id": session})["result"]["tools"]
    assert (first["name"], set(first)) == ("echo", {"name", "description", "inputSchema"})
    called = rpc(client, "tools/call", {"session_id": session, "name": "echo", "arguments": {"word": "hi"}})
    assert (called["id"], called["result"]["content"]) == (7, [{"type": "text", "text": "hi"}])
    assert client.get("/state", params={"session_id": session}).json()["step_count"] == 1
    assert rpc(client, "openenv/session/close", {"session_id": session})["result"]["closed"]
    assert len(client.table) == 0
    assert rpc(client, "tools/list", {"session_id": session})["error"]["code"] == -32602


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc":"1.0","method":"tools/list"}', -32600),
        (b'{"jsonrpc":"2.0","method":"tools/list","more":1}', -32600),
        (b'{"jsonrpc":"2.0","method":"initialize"}', -32601),
        (b'{"jsonrpc":"2.0","method":"tools/call","params":{}}', -32602),
        (b'{"jsonrpc":"2.0","method":"openenv/session/close","params":{}}', -32602),
        (b'{"jsonrpc":"2.0","method":"tools/call","params":{"name":"echo","arguments":{"word":"fail"}}}', -32603),
    ],
)
def test_json_rpc_errors_have_their_codes(client, body, code):
    response = client.post("/mcp", content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (200, code)
    with client.websocket_connect("/mcp") as socket:
        socket.send_text(body.decode())
        assert socket.receive_json()["error"]["code"] == code


def test_a_full_server_refuses_a_session_by_json_rpc():
    with serving(most=1) as client:
        rpc(client, "openenv/session/create")
        error = rpc(client, "openenv/session/create")["error"]
        assert (error["code"], error["data"]) == (-32000, {"active_sessions": 1, "max_sessions": 1})


def test_one_connection_at_a_time_has_a_session_and_a_close_waits_for_it(client):
    session = rpc(client, "openenv/session/create")["result"]["session_id"]
    path = f"/ws?session_id={session}"
    with client.websocket_connect(path) as socket:
        ask(socket, {"type": "reset"})
        assert ask(socket, call("hello")) == said("hello")
        with client.websocket_connect(path) as second:
            assert error_of(second.receive_json()) == "SESSION_ERROR"
    with client.websocket_connect(path) as socket:
        assert ask(socket, {"type": "state"})["data"]["step_count"] == 1
        closing = rpc(client, "openenv/session/close", {"session_id": session})["result"]
        assert closing == {"session_id": session, "closed": False, "closing": True}
        assert ask(socket, call("more")) == said("more")
    assert len(client.table) == 0
    with client.websocket_connect(path) as gone:
        assert error_of(gone.receive_json()) == "SESSION_ERROR"


def test_every_task_of_a_list_is_had_by_its_index_and_none_behind_it(client):
    with client.websocket_connect("/ws") as socket:
        for index in range(7):
            data = ask(socket, {"type": "reset", "data": {"index": index}})["data"]
            assert data["observation"]["messages"][0]["content"] == f"task echo/train/{index}"
        assert error_of(ask(socket, {"type": "reset", "data": {"index": 7}})) == "VALIDATION_ERROR"
        held = ask(socket, {"type": "reset", "data": {"split": "test", "index": 7}})["data"]
        assert held["observation"]["messages"][0]["content"] == "task echo/heldout/7"


def test_http_acts_on_an_environment_of_the_moment_or_in_a_session(client):
    assert client.post("/reset").json()["observation"]["messages"][0]["content"].startswith("task echo/train/")
    stepped = client.post("/step", json={"action": {"tool_name": "echo", "arguments": {"word": "hi"}}})
    assert stepped.json() == {**said("hi")["data"], "metadata": None}
    assert len(client.table) == 0
    session = rpc(client, "openenv/session/create")["result"]["session_id"]
    client.post("/reset", json={"session_id": session, "split": "train", "index": 2})
    action = {"session_id": session, "action": {"tool_name": "echo", "arguments": {"word": "stop"}}}
    assert client.post("/step", json=action).json()["reward"] == 4.0
    assert client.post("/step", json={**action, "session_id": "none"}).status_code == 404
    wrong = client.post("/step", json={"action": {"tool": 1}})
    assert (wrong.status_code, wrong.json()["detail"][0]["loc"]) == (422, ["action"])


def test_tasks_are_named_and_not_told(client):
    assert client.get("/list_environments").json() == ["echo"]
    assert [split["name"] for split in client.get("/echo/splits").json()] == ["train", "heldout"]
    assert client.post("/echo/num_tasks", json={"split": "train"}).json() == {"num_tasks": 7}
    task = {"id": "echo/train/6", "split": "train", "index": 6}
    assert client.post("/echo/task", json={"split": "train", "index": 6}).json() == {"task": task}
    some = {"split": "train", "start": 5, "stop": 9}
    assert [t["index"] for t in client.post("/echo/task_range", json=some).json()["tasks"]] == [5, 6]
    assert len(client.post("/echo/tasks", json={"split": "train"}).json()["tasks"]) == 7
    statuses = [
        client.post("/echo/task", json={"split": "train", "index": 7}).status_code,
        client.post("/other/tasks", json={"split": "train"}).status_code,
        client.post("/echo/tasks", json={"split": "heldout"}).status_code,
    ]
    assert statuses == [400, 404, 501]


def test_what_it_is_is_said_as_clients_read_it(client):
    schema = client.get("/schema").json()
    assert (schema["action"]["title"], set(schema)) == (
        "CallToolAction",
        {"action", "observation", "reset_observation", "state"},
    )
    assert client.get("/metadata").json()["name"] == "echo"
    assert client.get("/openenv/echo/metadata").json() == client.get("/metadata").json()
    with client.websocket_connect("/openenv/echo/ws") as socket:
        assert ask(socket, {"type": "reset"})["type"] == "observation"


class Between:
    """Hands each call to the process that its session names, as a server's processes do."""

    def __init__(self) -> None:
        board = Board(2)
        self.tables = [table_of(board=Board(2, worker, board.descriptor)) for worker in range(2)]

    async def answer(self, call):
        return await self.tables[int(call.session.partition("-")[0])].answer(call)


def test_a_session_with_an_id_is_reached_through_every_process():
    between = Between()
    with serving_by(between.tables[0], between) as owner, serving_by(between.tables[1], between) as other:
        session = rpc(owner, "openenv/session/create")["result"]["session_id"]
        hello = {"session_id": session, "name": "echo", "arguments": {"word": "hello"}}
        assert rpc(other, "tools/call", hello)["result"]["data"] == "hello"
        assert other.post("/reset", json={"session_id": session, "index": 4}).status_code == 200
        with other.websocket_connect(f"/ws?session_id={session}") as socket:
            assert error_of(ask(socket, {"type": "step", "data": {"tool": 1}})) == "VALIDATION_ERROR"
            assert ask(socket, call("more")) == said("more")
            assert rpc(owner, "openenv/session/close", {"session_id": session})["result"]["closing"]
        assert [len(table) for table in between.tables] == [0, 0]
        assert other.get("/state", params={"session_id": session}).status_code == 404


async def test_a_call_that_comes_again_under_its_id_acts_once():
    table = table_of()
    sessions = OpenEnvSessions(table, table, "echo")
    name = await sessions.create()
    await sessions.named(name).act("reset")
    data = b'{"tool_name":"echo","arguments":{"word":"hello"}}'
    again = OpenEnv(id="1", session=name, environment="echo", operation="step", data=data)
    assert await table.answer(again) == await table.answer(again)
    assert (await sessions.named(name).act("state"))["step_count"] == 1
