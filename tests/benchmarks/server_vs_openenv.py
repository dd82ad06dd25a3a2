"""agentrl's environment server beside OpenEnv's and a bare FastAPI WebSocket: the same echo, one raw client.

All are up at once and are measured in turn, round after round, with one session and with 64. agentrl's answers
OpenEnv's protocol (`agentrl`) and its own (`native`). OpenEnv's has the echo as its environments are written, with a
`step` that the server calls in a thread, and once more by coroutines (`openenv_async`), which few are. Processor time
is that of the server's processes, by /proc.

Figures, by OpenEnv's protocol, ratios of the same round, medians over the rounds: `cpu_ratio`, agentrl's processor time
of a step over OpenEnv's, the greater of those of 1 and 64 sessions; `cpu_ratio_async`, the same over `openenv_async`;
`wall_ratio_1` and `wall_ratio_64`, agentrl's steps a second over OpenEnv's; `sessions_held`, episodes of agentrl's
server that were open at once and ended well; `crosstalk`, answers among these that were not those of their session:
each says words of its own, and its reward is their length; `session_kb`, what a session adds to the server's resident
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.process.loop import run_async
from agentrl.process.ports import free_port
from tests.benchmarks.report import report
from tests.servers.held_sessions import Say, begin_episode, hold_sessions
from tests.servers.process import running_server
from tests.servers.raw_websocket import RawConnection

ROOT = Path(__file__).parents[2]
OPENENV_PYTHON = ROOT / ".venv-openenv-0.10/bin/python"
SESSIONS = (1, 64)
HELD = 1000
_ECHO = "tests.servers.echo:echo"
_TICKS = os.sysconf("SC_CLK_TCK")
_START_S = 240.0
Begin = Callable[[RawConnection], Awaitable[Say]]


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up: its port, its WebSocket's path, its process, and how an episode begins there."""

    port: int
    path: str
    pid: int
    begin: Begin


@dataclass(frozen=True, slots=True)
class Measured:
    """One stretch of steps: the server's processor time of a step, and steps a second."""

    cpu_us: float
    rate: float


async def _begin_bare(connection: RawConnection) -> Say:
    return lambda word: connection.ask(b'{"type":"step","data":{"word":"%s"}}' % word.encode())


async def _begin_openenv(connection: RawConnection) -> Say:
    await connection.ask(b'{"type":"reset","data":{"seed":1}}')
    return lambda word: connection.ask(b'{"type":"step","data":{"word":"%s"}}' % word.encode())


async def _begin_native(connection: RawConnection) -> Say:
    await connection.read()  # the server's hello
    name = f"n{id(connection)}-{time.monotonic_ns()}"
    task = {"environment": "echo", "split": "train", "ordinal": 0, "payload": {}}
    opened = {"method": "open", "id": name, "environment": _ECHO, "task": task}
    session = json.loads(await connection.ask(json.dumps(opened).encode()))["result"]["session"]
    await connection.ask(json.dumps({"method": "start", "id": f"{name}-start", "session": session}).encode())
    step = (
        b'{"method":"step","id":"%s-%d","session":"%s","action":{"role":"assistant","tool_calls":'
        b'[{"id":"c","name":"echo","arguments":{"word":"%s"}}]}}'
    )
    numbers = iter(range(2**40))
    return lambda word: connection.ask(step % (name.encode(), next(numbers), session.encode(), word.encode()))


def cpu_s(pid: int) -> float:
    """Processor time of a process and of all that it started, those that ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / _TICKS
    return own + sum(cpu_s(child) for child in _children(pid))


def resident_kb(pid: int) -> float:
    """Memory that a process and its children hold."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024 + sum(resident_kb(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


async def measure(server: Server, sessions: int, steps: int) -> Measured:
    """So many steps, spread over so many sessions."""
    connections = [await RawConnection.open(server.port, server.path) for _ in range(sessions)]
    says = [await server.begin(connection) for connection in connections]
    await asyncio.gather(*(_play(say, f"warm-{n}", 20) for n, say in enumerate(says)))
    before, began = cpu_s(server.pid), time.perf_counter()
    await asyncio.gather(*(_play(say, f"session-{n}", steps // sessions) for n, say in enumerate(says)))
    took, spent = time.perf_counter() - began, cpu_s(server.pid) - before
    for connection in connections:
        connection.close()
    done = steps // sessions * sessions
    return Measured(spent / done * 1e6, done / took)


async def _play(say: Say, name: str, steps: int) -> None:
    for number in range(steps):
        word = f"{name}-{number}"
        answer = await say(word)
        assert word.encode() in answer, answer


@contextmanager
def _servers(folder: Path) -> Iterator[Mapping[str, Server]]:
    ports = {name: free_port() for name in ("bare", "openenv", "openenv_async", "agentrl")}
    openenv = [OPENENV_PYTHON, ROOT / "tests/adapters/openenv_side/serve.py"]
    commands = {
        "bare": [sys.executable, "-m", "tests.benchmarks.bare_websocket", ports["bare"]],
        "openenv": [*openenv, "echo", ports["openenv"], 2 * HELD],
        "openenv_async": [*openenv, "async_echo", ports["openenv_async"], 2 * HELD],
        "agentrl": [
            *(sys.executable, "-m", "agentrl.cli.main", "env", "serve", _ECHO),
            *("--port", ports["agentrl"], "--max-sessions", 2 * HELD),
        ],
    }
    with ExitStack() as stack:
        pids: dict[str, int] = {}
        for name, command in commands.items():
            server = running_server([str(part) for part in command], ports[name], folder / name, _START_S)
            stack.enter_context(server)
            (pids[name],) = set(_children(os.getpid())) - set(pids.values())
        yield {
            "bare": Server(ports["bare"], "/ws", pids["bare"], _begin_bare),
            "openenv": Server(ports["openenv"], "/ws", pids["openenv"], _begin_openenv),
            "openenv_async": Server(ports["openenv_async"], "/ws", pids["openenv_async"], _begin_openenv),
            "agentrl": Server(ports["agentrl"], "/ws", pids["agentrl"], begin_episode),
            "native": Server(ports["agentrl"], "/connect", pids["agentrl"], _begin_native),
        }


async def _run(servers: Mapping[str, Server], rounds: int, steps: int) -> None:
    found: dict[tuple[str, int], list[Measured]] = {}
    for _ in range(rounds):
        for sessions in SESSIONS:
            for name, server in servers.items():
                found.setdefault((name, sessions), []).append(await measure(server, sessions, steps))
    served, memory_kb = servers["agentrl"], []
    memory_kb.append(resident_kb(served.pid))
    held = await hold_sessions(served.port, HELD, lambda: memory_kb.append(resident_kb(served.pid)))
    cpu = {key: [each.cpu_us for each in all_of] for key, all_of in found.items()}
    rate = {key: [each.rate for each in all_of] for key, all_of in found.items()}
    report(
        "server_vs_openenv",
        cpu_ratio=max(_ratio(cpu, "openenv", n) for n in SESSIONS),
        cpu_ratio_async=max(_ratio(cpu, "openenv_async", n) for n in SESSIONS),
        wall_ratio_1=_ratio(rate, "openenv", 1),
        wall_ratio_64=_ratio(rate, "openenv", 64),
        sessions_held=held.ended_well,
        crosstalk=held.crosstalk,
        session_kb=(memory_kb[1] - memory_kb[0]) / HELD,
        cpu_us={f"{name}, {n}": round(statistics.median(all_of), 1) for (name, n), all_of in cpu.items()},
        steps_a_second={f"{name}, {n}": round(statistics.median(all_of)) for (name, n), all_of in rate.items()},
        rounds=rounds,
        steps=steps,
    )


def _ratio(figures: Mapping[tuple[str, int], list[float]], other: str, sessions: int) -> float:
    """agentrl's figure over another server's."""
    pairs = zip(figures["agentrl", sessions], figures[other, sessions], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _servers(Path(folder)) as servers:
        run_async(_run(servers, arguments.rounds, arguments.steps))


if __name__ == "__main__":
    main()
