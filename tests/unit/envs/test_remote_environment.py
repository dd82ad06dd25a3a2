"""The client of environment servers: whatever becomes of connections and answers, a result is that of its own call."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from http import HTTPStatus
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosedError

from agentrl import codec
from agentrl.envs import connection as connecting
from agentrl.envs import servers as pooling
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.connection import Address, ServerConnection
from agentrl.envs.remote import RemoteEnvironment, RemoteHost, describe_remote
from agentrl.envs.servers import ServerPool, server_addresses
from agentrl.envs.wire import PROTOCOL, VERSION, Answer, Attach, Call, Describe, Open, Opened, Outcome, ServerBusyError
from agentrl.types.environment import EnvironmentDescription, Opening, Origin, Score, StepResult
from agentrl.types.errors import Boundary, ConfigError, EpisodeError, Failure
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task

TASK = Task("counting", Split.TRAIN, 0)
KNOWN = EnvironmentDescription("counting")
CALL_S = 60.0
LOST = st.lists(st.sampled_from(["lost_before", "lost_after"]), max_size=2)
FAULTS = st.tuples(LOST, st.sampled_from(["answered", "duplicate", "stale", "cancelled", "timed_out"]))
PLANS = st.lists(st.tuples(st.sampled_from(["step", "score", "start"]), FAULTS), max_size=8)


class FaultyServer:
    """Remembers answers by id, as a server does, and loses, repeats and delays what it says.

    `faults` has what becomes of the calls to come. An answer that is held back is sent before the next one, whatever
    connection that goes to.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.effects: list[str] = []
        self.is_held = asyncio.Event()
        self._answers: dict[str, bytes] = {}
        self._held: list[bytes] = []

    async def serve(self, socket) -> None:
        await socket.send(hello())
        async for frame in socket:
            call = codec.decode(frame, Call)
            # Never answered in time: whether it comes at all depends on the machine.
            if isinstance(call, Outcome):
                self._held.append(codec.encode(Answer(call.id)))
                continue
            fault = self.faults.pop(0) if self.faults else "answered"
            if fault == "lost_before":
                socket.transport.abort()
                return
            if call.id not in self._answers:
                self._answers[call.id] = codec.encode(Answer(call.id, self._act(call)))
            if fault == "lost_after":
                socket.transport.abort()
                return
            await self._say(socket, fault, self._answers[call.id])

    async def _say(self, socket, fault: str, answer: bytes) -> None:
        if fault in ("cancelled", "timed_out"):
            self._held.append(answer)
            self.is_held.set()
            return
        for late in self._held:
            await socket.send(late)
        self._held.clear()
        if fault == "stale":
            for earlier in list(self._answers.values())[:-1]:
                await socket.send(earlier)
        for _ in range(1 + (fault == "duplicate")):
            await socket.send(answer)

    def _act(self, call) -> object:
        match type(call).__name__:
            case "Step":
                self.effects.append(call.action.content)
                return StepResult((Message(Role.TOOL, f"result of {call.action.content}"),))
            case "GiveScore":
                return Score(float(len(self.effects)))
            case "Start":
                return Opening((Message(Role.USER, f"opening behind {len(self.effects)}"),))
        return None


def hello(**other) -> str:
    said = {"protocol": PROTOCOL, "version": VERSION, "agentrl": "0.1.0", "worker": 0, "environments": ["counting"]}
    return codec.to_json({**said, "free": 5, "max_message_bytes": 10_000, **other}).decode()


@asynccontextmanager
async def listening(handler, **settings):
    async with serve(handler, "127.0.0.1", 0, compression=None, **settings) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def play(plan) -> None:
    server = FaultyServer()
    async with listening(server.serve) as url:
        connection = ServerConnection(Address(url))
        environment = RemoteEnvironment(connection, "0-x", 0, CALL_S)
        sent = []
        for number, (method, (lost, fault)) in enumerate(plan):
            server.faults = [*lost, fault]
            server.is_held.clear()
            action = Message(Role.ASSISTANT, f"action {number}")
            sent += [action.content] if method == "step" else []
            call = asyncio.create_task(environment.step(action) if method == "step" else getattr(environment, method)())
            if fault in ("cancelled", "timed_out"):
                await give_up(environment, server, call, fault)
                continue
            assert await call == expected(method, action, len(sent))
        assert server.effects == sent, "each action has acted once, in order"
        server.faults = []
        await environment.close()
        connection.drop()


async def give_up(environment: RemoteEnvironment, server: FaultyServer, call: asyncio.Task, fault: str) -> None:
    """Cancel a call that has no answer, from outside or as its own deadline does."""
    await server.is_held.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    if fault == "timed_out":
        environment._call_s = 0.01
        with pytest.raises(EpisodeError, match=r"timeout"):
            await environment.outcome(0, [])
        environment._call_s = CALL_S


def expected(method: str, action: Message, num_effects: int) -> object:
    if method == "step":
        return StepResult((Message(Role.TOOL, f"result of {action.content}"),))
    if method == "score":
        return Score(float(num_effects))
    return Opening((Message(Role.USER, f"opening behind {num_effects}"),))


@settings(max_examples=50)
@given(PLANS)
def test_no_interleaving_pairs_a_result_with_another_call_or_acts_twice(plan) -> None:
    with patch.object(connecting, "_FIRST_PAUSE_S", 0.0):
        asyncio.run(play(plan))


async def test_a_call_is_sent_again_under_its_id_until_it_is_answered() -> None:
    server = FaultyServer()
    async with listening(server.serve) as url:
        connection = ServerConnection(Address(url))
        server.faults = ["lost_before", "lost_after", "lost_before"]
        result = await RemoteEnvironment(connection, "0-x", 0, CALL_S).step(Message(Role.ASSISTANT, "go"))
        connection.drop()
    assert result.messages[0].content == "result of go"
    assert server.effects == ["go"]
    assert connection.counts["lost connections"] == 3


async def says(socket, first: str) -> None:
    await socket.send(first)
    await socket.wait_closed()


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (hello(version=VERSION + 1, agentrl="9.9"), "speaks version 2 of its protocol.*install agentrl 9.9 here"),
        ('{"type":"observation"}', "is no environment server of agentrl; start one with `agentrl env serve`"),
        ("what?", "is no environment server of agentrl"),
    ],
)
async def test_a_server_of_another_protocol_or_version_is_named(first: str, message: str) -> None:
    async with listening(lambda socket: says(socket, first)) as url:
        with pytest.raises(ConfigError, match=message):
            await describe_remote("counting", [Address(url)], CALL_S)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (HTTPStatus.UNAUTHORIZED, "wants another token"),
        (HTTPStatus.NOT_FOUND, "HTTP 404 at /connect.*start one with `agentrl env serve`"),
        (HTTPStatus.BAD_GATEWAY, "does not answer.*502"),
    ],
)
async def test_a_server_that_refuses_the_connection_is_named(status: HTTPStatus, message: str) -> None:
    def refuse(connection, request):
        return connection.respond(status, "no\n")

    async with listening(says, process_request=refuse) as url:
        with pytest.raises(ConfigError, match=message):
            await describe_remote("counting", [Address(url)], CALL_S)


class PlainServer:
    """Answers every call of a kind with what it is told."""

    def __init__(self, answers: dict[type, object], **other) -> None:
        self.answers, self.calls, self._other = answers, [], other

    async def serve(self, socket) -> None:
        await socket.send(hello(**self._other))
        async for frame in socket:
            call = codec.decode(frame, Call)
            self.calls.append(call)
            answer = self.answers.get(type(call))
            if isinstance(answer, ServerBusyError):
                said = Answer(call.id, failure=answer.failure, retry_after_s=answer.retry_after_s)
            else:
                said = Answer(call.id, failure=answer) if isinstance(answer, Failure) else Answer(call.id, answer)
            await socket.send(codec.encode(said))


async def test_new_sessions_go_to_the_server_with_room_and_away_from_one_that_is_full_or_gone(caplog) -> None:
    full = PlainServer({Describe: KNOWN, Open: ServerBusyError("full", 0.01)}, free=90)
    other = PlainServer({Describe: KNOWN, Open: Opened("0-other", 7)}, free=8)
    async with listening(full.serve) as full_url, listening(other.serve) as other_url:
        gone = "http://127.0.0.1:1"
        host = await describe_remote("counting", [Address(url) for url in (gone, full_url, other_url)], CALL_S)
        async with host.open(TASK) as environment:
            assert await environment.handle() == f"{other_url}/sessions/0-other"
        assert [type(call).__name__ for call in full.calls] == ["Describe", "Open"]
        assert [type(call).__name__ for call in other.calls] == ["Describe", "Open", "Close"]
        assert host._pool.counts["refused"] == 1
        await host.close()
    assert f"environment servers {gone}, {full_url}, {other_url}: 1 refused" in caplog.text


class Clock:
    """Ten seconds later whenever it is looked at."""

    now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 10.0
        return self.now_s


async def test_a_session_waits_for_room_on_full_servers_and_no_longer_than_its_deadline() -> None:
    server = PlainServer({Describe: KNOWN, Open: ServerBusyError("full", 0.01)})
    async with listening(server.serve) as url:
        host = RemoteHost("counting", KNOWN, pool := ServerPool([Address(url)]), CALL_S)
        opening = asyncio.create_task(host.open(TASK).__aenter__())
        while not pool.counts["waits"]:
            await asyncio.sleep(0)
        server.answers[Open] = Opened("0-late", 1)
        assert (await opening)._session == "0-late"
        server.answers[Open] = ServerBusyError("full", 0.01)
        with patch.object(pooling, "time", Clock()), pytest.raises(EpisodeError, match=r"environment\(busy\): full"):
            await host.open(TASK).__aenter__()
        await host.close()


@pytest.mark.parametrize("fails", ["handshake", "connect"])
async def test_a_connection_that_ends_while_it_is_made_is_no_more_than_a_server_that_is_away(fails: str) -> None:
    other = PlainServer({Open: Opened("0-other", 7)})
    ending = await asyncio.start_server(lambda reader, writer: writer.transport.abort(), "127.0.0.1", 0)
    one = f"http://127.0.0.1:{ending.sockets[0].getsockname()[1]}"
    real = connecting.connect

    def connect(url: str, **settings):
        if fails == "connect" and url.startswith(one.replace("http", "ws")):
            raise ConnectionClosedError(None, None)
        return real(url, **settings)

    async with listening(other.serve) as two, ending:
        pool = ServerPool([Address(one), Address(two)])
        pool._servers[one].free = 9
        host = RemoteHost("counting", KNOWN, pool, CALL_S)
        with patch.object(connecting, "connect", connect):
            async with host.open(TASK) as environment:
                assert await environment.handle() == f"{two}/sessions/0-other"
        await host.close()


async def test_an_environment_that_cannot_be_made_is_not_tried_elsewhere() -> None:
    broken = PlainServer({Open: Failure(Boundary.ENVIRONMENT, "create", "no database")}, free=9)
    other = PlainServer({Open: Opened("0-other", 7)})
    async with listening(broken.serve) as one, listening(other.serve) as two:
        pool = ServerPool([Address(one), Address(two)])
        pool._servers[one].free = 9
        with pytest.raises(EpisodeError, match=r"environment\(create\): no database"):
            await RemoteHost("counting", KNOWN, pool, CALL_S).open(TASK).__aenter__()
        pool.close()
    assert other.calls == []


async def test_servers_that_do_not_say_the_same_are_named() -> None:
    one = PlainServer({Describe: KNOWN})
    two = PlainServer({Describe: EnvironmentDescription("counting", num_tasks=3)})
    async with listening(one.serve) as first, listening(two.serve) as second:
        with pytest.raises(ConfigError, match=r"is not the same at .*num_tasks=3.*start both servers with the same"):
            await describe_remote("counting", [Address(first), Address(second)], CALL_S)


async def test_no_server_that_answers_is_an_error_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"127.0.0.1:1 does not answer.*start its server with `agentrl env serve cou"):
        await describe_remote("counting", [Address("http://127.0.0.1:1")], CALL_S)


async def test_a_message_that_is_too_large_is_not_sent() -> None:
    server = PlainServer({Open: Opened("0-x", 1)})
    async with listening(server.serve) as url:
        host = RemoteHost("counting", KNOWN, ServerPool([Address(url)]), CALL_S)
        async with host.open(TASK) as environment:
            with pytest.raises(EpisodeError, match=r"too_large.*takes 10000; start it with a greater --max-message-mb"):
                await environment.step(Message(Role.ASSISTANT, "x" * 10_000))
        await host.close()


async def test_a_session_of_a_server_that_is_gone_or_unknown_is_lost() -> None:
    gone = Address("http://127.0.0.1:1")
    with pytest.raises(
        EpisodeError, match=r"environment\(lost\): environment server http://127.0.0.1:1 cannot be reached"
    ):
        await ServerConnection(gone).call(Attach(id="1", session="0-x"), CALL_S, patience_s=0.0)
    host = RemoteHost("counting", KNOWN, ServerPool([gone]), CALL_S)
    for handle in ("http://elsewhere:1/sessions/0-x", "nonsense"):
        with pytest.raises(EpisodeError, match=r"environment\(lost\).*is not among environment.servers"):
            await host.open(TASK, Origin(handle=handle, token=1)).__aenter__()


async def test_a_handle_is_attached_under_the_token_and_left_alive_when_it_is_detached() -> None:
    server = PlainServer({})
    async with listening(server.serve) as url:
        host = RemoteHost("counting", KNOWN, ServerPool([Address(url)]), CALL_S)
        async with host.open(TASK, Origin(handle=f"{url}/sessions/3-abc", token=7)) as environment:
            await environment.detach()
        await host.close()
    [call] = server.calls
    assert (type(call), call.session, call.token) == (Attach, "3-abc", 7)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"placement": "remote"}, "servers belong together"),
        ({"servers": ("http://10.0.0.5:8100",)}, "servers belong together"),
        (
            {"placement": "remote", "servers": ("http://a:1",), "options": {"rows": 3}},
            "give `agentrl env serve` its --opt",
        ),
    ],
)
def test_a_recipe_that_says_two_things_is_refused(section, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentConfig(name="sql", **section)


@pytest.mark.parametrize("url", ["10.0.0.5:8100", "ftp://10.0.0.5", "http://", "http:/10.0.0.5"])
def test_a_server_that_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL; write http://HOST:PORT"):
        server_addresses(EnvironmentConfig(name="sql", placement="remote", servers=(url,)))
