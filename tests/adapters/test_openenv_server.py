"""OpenEnv's own clients, unmodified, against agentrl's server."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest

from tests.adapters.conftest import ROOT, SIDE, echo_server, openenv_python

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """A server of the echo environment for two sessions, of two processes, by its command."""
    with echo_server("--max-sessions", "2", "--workers", "2", folder=tmp_path_factory.mktemp("server")) as url:
        yield url


class Client:
    """One of OpenEnv's clients in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, *call: object) -> dict:
        """What the client gives or raises."""
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def leave(self) -> None:
        """End its session in order."""
        self.process.stdin.close()
        self.process.wait()

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                pipe.close()


@pytest.fixture
def join(openenv_version, server) -> Iterator[Callable[[str], Client]]:
    clients = []

    def join(kind: str = "generic") -> Client:
        command = [str(openenv_python(openenv_version)), str(SIDE / "play.py"), kind, server]
        process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        clients.append(Client(process))
        return clients[-1]

    yield join
    for client in clients:
        client.end()
    wait_until_empty(server)


def wait_until_empty(server: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while httpx.get(f"{server}/health", trust_env=False, timeout=60.0).json()["sessions"]:
        assert time.monotonic() < until, "sessions outlive their clients"
        time.sleep(0.1)


def echoing(word: str) -> dict:
    return {"type": "call_tool", "tool_name": "echo", "arguments": {"word": word}}


def test_a_generic_client_plays_whole_episodes(join):
    client = join()
    for index in (3, 4):
        first = client("reset", {"split": "train", "index": index})
        assert first["observation"]["messages"] == [{"role": "user", "content": f"task echo/train/{index}"}]
        assert (first["reward"], first["done"]) == (None, False)
        step = client("step", echoing("hello"))
        assert (step["observation"]["result"], step["reward"], step["done"]) == ("hello", None, False)
        assert client("state")["state"]["step_count"] == 1
        last = client("step", echoing("stop"))
        assert (last["observation"]["result"], last["reward"], last["done"]) == ("stop", 9.0, True)


def test_the_same_seed_is_the_same_task(join):
    client = join()
    seeds = [client("reset", {"seed": seed})["observation"] for seed in (5, 6, 5)]
    assert seeds[0] == seeds[2] != seeds[1]


def test_mistakes_are_raised_by_their_code_and_the_session_goes_on(join):
    client = join()
    client("reset", {"seed": 1})
    assert "VALIDATION_ERROR" in client("step", {"word": "hello"})["raised"]
    broken = client("step", echoing("fail"))["raised"]
    assert "EXECUTION_ERROR" in broken
    assert "the echo is broken" in broken
    assert client("step", echoing("hello"))["observation"]["result"] == "hello"


def test_a_full_server_is_told_and_a_place_is_free_when_its_holder_leaves_or_dies(join, server):
    holders = [join(), join()]
    for holder in holders:
        assert "observation" in holder("reset", {"seed": 1})
    refused = join()("reset", {"seed": 1})["raised"]
    assert "CAPACITY_REACHED" in refused
    holders[0].leave()
    holders[1].end()
    wait_until_empty(server)
    assert "observation" in join()("reset", {"seed": 1})


def test_a_client_of_mcp_tools_lists_and_calls_them(join):
    client = join("mcp")
    assert client("tools")["tools"] == ["echo", "reply"]
    client("reset", {"seed": 1})
    assert client("call", "echo", {"word": "hello"})["result"] == "hello"
    client.leave()  # its session outlives a connection that breaks, and ends when it is closed
