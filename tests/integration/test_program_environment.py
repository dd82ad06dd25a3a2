"""Programs of scaffolds in the sandboxes of environments, which reach a gateway and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import pytest

from agentrl.envs.authoring import Rows, tool
from agentrl.envs.inline import InlineHost
from agentrl.envs.process import ProcessHost
from agentrl.envs.sandboxed import define_sandboxed
from agentrl.envs.starting import WorkerCommand
from agentrl.protocols import DurableEnvironment
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.sandbox import Command, CommandResult, Ended
from agentrl.types.task import Split, Task
from tests.integration.program_environment import NAME, Desk, DeskOptions, definition
from tests.integration.sandbox_hosts import keeper
from tests.storms.escape_targets import running_with

pytestmark = pytest.mark.timeout(600)
TASK = Task("desk", Split.TRAIN, 0, {"n": 1})
MOST = 12
# Calls that are all open at once, since the gateway answers when it has them all; then addresses that are not its own.
AGENT = """
import json, os, socket, sys, threading, urllib.request
answers, url = {}, os.environ["AGENTRL_GATEWAY"]
def call(number):
    request = urllib.request.Request(f"{url}/v1/{number}", b"x" * 1_000_000, {"Authorization": "Bearer key"})
    answers[number] = json.load(urllib.request.urlopen(request, timeout=300))
threads = [threading.Thread(target=call, args=(number,)) for number in range(int(sys.argv[1]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
reached = []
for address in sys.argv[2:]:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=20).close()
        reached.append(address)
    except OSError:
        pass
print(json.dumps({"answers": answers, "reached": reached}))
"""


class _Handler(BaseHTTPRequestHandler):
    together: threading.Barrier

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.together.wait(300)
        body = json.dumps([self.path, size, self.headers["Authorization"]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "a unix socket"

    def log_message(self, *arguments: object) -> None:
        pass


class _Server(ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 100


@contextmanager
def gateway() -> Iterator[str]:
    """A server of HTTP on a unix socket."""
    handler = type("Handler", (_Handler,), {"together": threading.Barrier(MOST)})
    with (
        tempfile.TemporaryDirectory(prefix="gateway-", dir="/tmp") as folder,
        _Server(f"{folder}/socket", handler) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{folder}/socket"
        server.shutdown()


@asynccontextmanager
async def desk(placement: str, logs: Path, **options: object) -> AsyncIterator[DurableEnvironment]:
    made = DeskOptions.model_validate(options)
    host: InlineHost | ProcessHost = InlineHost(definition, made, 60.0)
    if placement == "process":
        host = ProcessHost(WorkerCommand(NAME, options, logs), definition.describe(made), 60.0)
    try:
        async with host.open(TASK) as environment:
            await environment.start()
            yield environment
    finally:
        await host.close()


def begun(environment: DurableEnvironment, script: str) -> asyncio.Task[CommandResult]:
    return asyncio.create_task(environment.run(Command(("sh", "-c", script), timeout_s=3600), "program"))


async def until_running(mark: str, is_running: bool = True) -> None:
    async with asyncio.timeout(300):
        while bool(running_with(mark)) is not is_running:
            await asyncio.sleep(0.05)


async def shell(environment: DurableEnvironment, script: str) -> str:
    call = ToolCall("episode/0.0", "shell", {"script": script})
    return (await environment.step(Message(Role.ASSISTANT, tool_calls=(call,)))).messages[0].content


@pytest.mark.parametrize(
    ("backend", "placement"), [("bwrap", "inline"), ("bwrap", "process"), ("local", "inline"), ("local", "process")]
)
async def test_a_program_calls_the_gateway_many_times_at_once_and_reaches_nothing_else(
    backend: str, placement: str, tmp_path: Path
) -> None:
    is_isolated = backend == "bwrap"
    with gateway() as path, socket.create_server(("127.0.0.1", 0)) as other:
        elsewhere = f"127.0.0.1:{other.getsockname()[1]}"
        async with keeper(backend), desk(placement, tmp_path, is_isolated=is_isolated) as environment:
            command = Command(("python3", "-I", "-c", AGENT, str(MOST), elsewhere), timeout_s=500, gateway=path)
            result = await environment.run(command, "program")
    assert result.exit_code == 0, result.text
    said = json.loads(result.stdout)
    assert said["answers"] == {str(n): [f"/v1/{n}", 1_000_000, "Bearer key"] for n in range(MOST)}
    assert said["reached"] == ([] if is_isolated else [elsewhere])


@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_a_program_is_stopped_while_it_is_waited_for_and_the_environment_goes_on(
    placement: str, tmp_path: Path
) -> None:
    async with keeper("local"), desk(placement, tmp_path, is_isolated=False) as environment:
        running = begun(environment, "echo begun > mark; sleep 4731")
        await until_running("4731")
        await asyncio.gather(environment.stop("another"), environment.stop("program"))
        result = await running
        assert (result.ended, bool(running_with("4731"))) == (Ended.STOPPED, False)
        await environment.stop("program")
        assert await begun(environment, "echo a second time >> mark") == result
        assert await shell(environment, "cat mark") == "begun\n"
        assert (await environment.score()).reward == 1.0


@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_a_program_that_is_given_up_ends_with_its_environment(placement: str, tmp_path: Path) -> None:
    async with keeper("local", abandoned_s=100_000):
        async with desk(placement, tmp_path, is_isolated=False) as environment:
            await environment.handle()  # by which others would find it
            running = begun(environment, "sleep 4732")
            await until_running("4732")
            running.cancel()
            await asyncio.wait([running])
        await until_running("4732", is_running=False)


async def test_a_worker_whose_program_was_given_up_plays_the_next_episode(tmp_path: Path) -> None:
    options = DeskOptions(is_isolated=False)
    async with keeper("local"):
        host = ProcessHost(WorkerCommand(NAME, options.model_dump(), tmp_path), definition.describe(options), 60.0)
        for _ in range(2):
            async with host.open(TASK) as environment:
                await environment.start()
                running = begun(environment, "sleep 4733")
                await until_running("4733")
                running.cancel()
                await asyncio.wait([running])
        assert [log.name for log in tmp_path.glob("environment-*.log")] == ["environment-0.log"]
        await host.close()


async def test_a_sandbox_without_a_gateway_names_none(tmp_path: Path) -> None:
    async with keeper("local"), desk("inline", tmp_path, is_isolated=False) as environment:
        assert await shell(environment, "echo gateway: $AGENTRL_GATEWAY") == "gateway:\n"


def test_a_tool_that_hides_how_programs_are_run_is_refused() -> None:
    class Hiding(Desk):
        """A desk with a tool of that name."""

        @tool
        async def run(self, script: str) -> str:  # type: ignore[override]
            """Run a script."""
            return script

    with pytest.raises(ConfigError, match="a tool named run"):
        define_sandboxed("hiding", Hiding, Rows([{"n": 1}, {"n": 2}]), options=DeskOptions)
