"""One process of a server: it has sessions of its own, and shares the port with the others.

Its parent sends it a `WorkerSpec`, and later one line to stop in order; it answers with a line once it takes calls, or
with why it cannot. It ends with its parent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvicorn
from fastapi import FastAPI

from agentrl import codec
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_served_host
from agentrl.envs.process import WarmWorkers
from agentrl.process.loop import run_async
from agentrl.protocols import EnvironmentHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.starting import sandboxes
from agentrl.serving.app import build_app
from agentrl.serving.board import Board, Number
from agentrl.serving.options import ServerOptions
from agentrl.serving.routing import CallRouter
from agentrl.serving.table import SessionTable
from agentrl.types.errors import AgentRLError

STOP = b"stop\n"
_TICK_S = 0.5
_CLOSE_S = 5.0
_MAX_SPEC_BYTES = 2**24
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Which process of which server this is; `listener` and `board` are descriptors, `folder` has a socket of each."""

    options: ServerOptions
    worker: int
    listener: int
    board: int
    folder: str

    def socket_of(self, worker: int) -> Path:
        """Where a process listens for the others."""
        return Path(self.folder) / f"{worker}.sock"


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """That a process takes calls, or why it cannot."""

    error: str | None = None


class HttpServer(uvicorn.Server):
    """Serves an application, and leaves signals alone: the parent handles them."""

    def __init__(self, app: FastAPI, max_message_bytes: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="websockets-sansio",
                ws_max_size=max_message_bytes,
                ws_per_message_deflate=False,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=int(_CLOSE_S),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


class ServerWorker:
    """The sessions of one process and all that serves them."""

    def __init__(self, spec: WorkerSpec, hosts: dict[str, EnvironmentHost]) -> None:
        options = spec.options
        self._spec = spec
        self._board = Board(options.workers, spec.worker, spec.board)
        self.table = SessionTable(hosts, options.limits, self._board)
        others = {n: spec.socket_of(n) for n in range(options.workers) if n != spec.worker}
        self._router = CallRouter(self.table, others, options.token)
        self._http = HttpServer(build_app(self.table, self._router, options), options.max_message_bytes)

    async def start(self) -> None:
        """Take calls, from clients and from the other processes."""
        self._board.beat()
        self._board.set(Number.DRAINING, 0)
        path = self._spec.socket_of(self._spec.worker)
        path.unlink(missing_ok=True)
        inner = socket.socket(socket.AF_UNIX)
        inner.bind(str(path))
        sockets = [socket.socket(fileno=self._spec.listener), inner]
        self._serving = asyncio.create_task(self._http.serve(sockets=sockets), name="serve-http")
        self._ticking = asyncio.create_task(self._tick(), name="reap-sessions")
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            await self._serving

    async def drain(self) -> None:
        """Take no new sessions, and end those that there are when their time is up.

        Waits for: their holders. Unblocked by: these, or `drain_s`.
        """
        self._board.set(Number.DRAINING, 1)
        until = asyncio.get_running_loop().time() + self._spec.options.drain_s
        while len(self.table) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_TICK_S / 10)
        if len(self.table):
            _log.warning("%d sessions are ended, since nobody closed them", len(self.table))
        await self.table.close()
        self._router.close()
        self._http.should_exit = True
        await self._serving
        self._ticking.cancel()

    async def _tick(self) -> None:
        """Say that this process is well, and end sessions that are old or unused."""
        while True:
            self._board.beat()
            await self.table.reap()
            await asyncio.sleep(_TICK_S)


async def build_hosts(options: ServerOptions, worker: int) -> dict[str, EnvironmentHost]:
    """Where the instances of each environment live. Raises ConfigError if one cannot be had."""
    hosts: dict[str, EnvironmentHost] = {}
    warm = WarmWorkers(options.limits.most)
    for number, (name, values) in enumerate(options.environments.items()):
        config = EnvironmentConfig(name=name, options=dict(values))
        label = f"server-{worker}-{number}"
        hosts[name] = await build_served_host(config, options.limits.call_s, Path(options.logs), label, warm)
    return hosts


async def _run(control: socket.socket) -> None:
    """Serve until the parent says to stop, or is gone."""
    reader, writer = await asyncio.open_connection(sock=control, limit=_MAX_SPEC_BYTES)
    spec = codec.from_json(await reader.readline(), WorkerSpec)
    async with sandboxes(SandboxConfig(kind=spec.options.sandbox, most=spec.options.limits.most), "server") as keeper:
        try:
            hosts = await build_hosts(spec.options, spec.worker)
            await keeper.start_for(host.description for host in hosts.values())
            worker = ServerWorker(spec, hosts)
        except AgentRLError as error:
            writer.write(msgspec.json.encode(WorkerReady(str(error))) + b"\n")
            await writer.drain()
            return
        await worker.start()
        writer.write(msgspec.json.encode(WorkerReady()) + b"\n")
        if await reader.readline() == STOP:
            await worker.drain()


def main() -> None:
    """Entry of the child: ``python -m agentrl.serving.worker FD``."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_async(_run(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
