"""Tools of real MCP servers, by a command and by a URL, played by the run's own way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.process.ports import free_port
from agentrl.protocols import Environment
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.types.environment import Score
from agentrl.types.errors import EpisodeError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split
from tests.adapters.conftest import ROOT, packages_python
from tests.adapters.trained import train

pytestmark = pytest.mark.usefixtures("beside_packages")
SERVER = ROOT / "tests/adapters/packages_side/mcp_server.py"
CALL_S = 120.0
START_S = 240.0
BUSY_MACHINE = (
    "buffer.stall_s=900",
    "policies.main.engine.kind=embedded",
    "policies.main.engine.start_s=600",
    "policies.main.trainer.deadlines.start_s=600",
)
NAMES = ["add", "divide", "note", "secret", "hang", "end"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    tasks = ({"prompt": f"How much is {a} + 22?", "answer": a + 22, "parts": [a, 22]} for a in range(20))
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return file


@contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """The server at a URL, which is given."""
    port = free_port()
    with (folder / "mcp.log").open("wb") as output:
        process = subprocess.Popen([packages_python(), SERVER, str(port)], stdout=output, stderr=output)
    try:
        until = time.monotonic() + START_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None, (folder / "mcp.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with http_server(tmp_path_factory.mktemp("server")) as found:
        yield found


def by_command() -> dict[str, Any]:
    return {"command": [str(packages_python()), str(SERVER), "stdio"]}


@pytest.fixture(params=["command", "url"])
def server(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options that name the server in either way."""
    return by_command() if request.param == "command" else {"url": request.getfixturevalue("url")}


@asynccontextmanager
async def playing(rows: Path, folder: Path, sessions: int = 1, **options: Any) -> AsyncIterator[list[Environment]]:
    """Episodes of the first task at once."""
    options = {"tasks": str(rows), "connect_s": CALL_S, **options}
    config = EnvironmentConfig(name="mcp", options=options, interpreter=packages_python())
    host = await build_host(config, CALL_S, folder)
    try:
        (task,) = await host.sample(Split.TRAIN, 0, [0])
        opened = [host.open(task) for _ in range(sessions)]
        yield [await each.__aenter__() for each in opened]
        for each in opened:
            await each.__aexit__(None, None, None)
    finally:
        await host.close()


def calling(name: str, **arguments: Any) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("call-0", name, arguments),))


async def said(environment: Environment, name: str, **arguments: Any) -> str:
    (message,) = (await environment.step(calling(name, **arguments))).messages
    return message.content


async def test_tools_are_listed_called_and_their_errors_read_and_the_answer_is_judged(server, rows, tmp_path):
    async with playing(rows, tmp_path, instructions="Use the tools.", **server) as (environment,):
        opening = await environment.start()
        assert [tool.name for tool in opening.tools] == NAMES
        assert opening.tools[0].description == "Add two numbers."
        assert opening.tools[0].parameters["required"] == ["a", "b"]
        assert [message.role for message in opening.messages] == [Role.SYSTEM, Role.USER]
        first = int(opening.messages[1].content.split()[3])
        assert await said(environment, "add", a=first, b=22) == str(first + 22)
        assert (await said(environment, "divide", a=1, b=0)).startswith("error: ")
        assert "valid integer" in await said(environment, "add", a="many", b=1)
        assert await said(environment, "root") == f"error: no tool 'root'; there is {', '.join(NAMES)}"
        assert (await environment.step(Message(Role.ASSISTANT, f" {first + 22}\n"))).is_done
        score = await environment.score()
    assert (score.reward, score.metrics) == (1.0, {"tool_calls": 4.0, "tool_errors": 3.0})


async def test_each_episode_has_a_session_of_its_own(server, rows, tmp_path):
    async with playing(rows, tmp_path, sessions=2, **server) as (first, second):
        await first.start()
        await second.start()
        assert await said(first, "note", text="one") == "one"
        assert await said(second, "note", text="two") == "two"
        assert await said(first, "note", text="three") == "one, three"


async def test_no_answer_and_another_one_score_nothing(url, rows, tmp_path):
    answers = (None, "", "about 42")
    async with playing(rows, tmp_path, sessions=len(answers), url=url) as environments:
        for environment, answer in zip(environments, answers, strict=True):
            await environment.start()
            if answer is not None:
                await environment.step(Message(Role.ASSISTANT, answer))
            assert (await environment.score()).reward == 0.0


async def test_a_function_judges_by_the_row_the_answer_and_the_calls(url, rows, tmp_path):
    async with playing(rows, tmp_path, url=url, judge="tests.adapters.packages_side.mcp_judge:judge") as (environment,):
        opening = await environment.start()
        first = int(opening.messages[0].content.split()[3])
        await said(environment, "add", a=first, b=22)
        await environment.step(Message(Role.ASSISTANT, "I do not know."))
        assert await environment.score() == Score(0.5, {"said": 4.0})


async def test_a_server_that_ends_fails_the_episode_as_the_infrastructures(rows, tmp_path):
    async with playing(rows, tmp_path, **by_command()) as (environment,):
        await environment.start()
        with pytest.raises(EpisodeError, match=r"environment\(lost\): the session with .* is gone"):
            await environment.step(calling("end"))
        with pytest.raises(EpisodeError, match=r"environment\(lost\): no session with "):
            await environment.step(calling("add", a=1, b=2))


async def test_a_server_at_a_url_that_ends_fails_the_episode_as_the_infrastructures(rows, tmp_path):
    with http_server(tmp_path) as url:
        async with playing(rows, tmp_path, url=url) as (environment,):
            await environment.start()
            with pytest.raises(EpisodeError, match=r"environment\(lost\): the session with .* is gone"):
                await environment.step(calling("end"))
    async with playing(rows, tmp_path, url=url) as (environment,):
        with pytest.raises(EpisodeError, match=r"environment\(create\): no session with .*connection"):
            await environment.start()


async def test_a_call_that_hangs_has_a_deadline_and_the_session_is_given_up(server, rows, tmp_path):
    async with playing(rows, tmp_path, call_s=3.0, **server) as (environment,):
        await environment.start()
        with pytest.raises(EpisodeError, match=r"timeout\(environment.step\): .* has not answered within 3 s"):
            await environment.step(calling("hang"))
        with pytest.raises(EpisodeError, match=r"environment\(lost\)"):
            await environment.step(calling("add", a=1, b=2))


async def test_a_program_that_is_no_server_is_named(rows, tmp_path):
    async with playing(rows, tmp_path, command=["false"]) as (environment,):
        with pytest.raises(EpisodeError, match=r"environment\(create\): no session with false: "):
            await environment.start()


async def test_a_program_that_never_greets_is_ended_with_the_session_that_gave_it_up(rows, tmp_path):
    async with playing(rows, tmp_path, command=["sleep", "654321"], connect_s=1.0) as (environment,):
        with pytest.raises(EpisodeError, match=r"timeout\(environment.start\): .* has not listed its tools within 1 s"):
            await environment.start()
        assert b"sleep\x00654321\x00" not in map(read_bytes, Path("/proc").glob("[0-9]*/cmdline"))


def read_bytes(path: Path) -> bytes:
    """What is in a file; nothing if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_bytes()
    return b""


async def test_a_program_gets_the_variables_that_are_named_and_ends_with_its_episode(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("SUMS_SECRET", "one")
    monkeypatch.setenv("SUMS_OTHER", "two")
    async with playing(rows, tmp_path, variables=["SUMS_SECRET"], **by_command()) as (environment,):
        await environment.start()
        assert await said(environment, "secret") == "one None"
        assert len(programs(os.getpid())) == 1
    assert programs(os.getpid()) == []


def programs(ancestor: int) -> list[int]:
    """Processes of the server below this one, without the one at a URL."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended since it was listed
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return [pid for pid in below - {ancestor} if arguments_of(pid)[1:3] == [str(SERVER), "stdio"]]


def arguments_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TINY_SHAPE.model_copy(update={"context_tokens": 4096})
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", shape=shape)


def test_an_episode_with_a_servers_tools_is_trained(model, rows, tmp_path):
    command = json.dumps([str(packages_python()), str(SERVER), "stdio"])
    table = f'[environment]\nname = "mcp"\ninterpreter = "{packages_python()}"\noptions.command = {command}\n'
    limits = {"max_context_tokens": 4096, "max_reply_tokens": 24, "max_turns": 2, "tool_s": 90}
    settings = [f"rollout.limits.{name}={value}" for name, value in limits.items()]
    trained = train(tmp_path, model, f'{table}options.tasks = "{rows}"', *settings, *BUSY_MACHINE)
    assert {line["task"].split("/")[0] for line in trained.ledger} == {"mcp"}
    print(json.dumps(trained.ledger[0]))
