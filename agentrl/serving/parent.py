"""The process that a person starts: it has the port, starts the processes that serve it, and replaces one that dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress

from agentrl import codec
from agentrl.process.parent import CHILD
from agentrl.process.ports import bind, is_loopback
from agentrl.process.starting import how_it_ended, kill_group, spawn
from agentrl.process.stopping import StopSignals
from agentrl.process.threads import run_in_thread
from agentrl.serving.board import Board
from agentrl.serving.options import ServerOptions
from agentrl.serving.worker import STOP, WorkerReady, WorkerSpec
from agentrl.types.errors import AgentRLError, ConfigError

WORKER_MODULE = "agentrl.serving.worker"
_START_S = 180.0
_EXIT_S = 30.0
_STARTS_AT_MOST = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_log = logging.getLogger(__name__)


class EnvironmentServer:
    """The processes of a server, behind one socket."""

    def __init__(self, options: ServerOptions, listener: socket.socket) -> None:
        self._options, self._listener = options, listener
        self._board = Board(options.workers)
        self._controls: dict[int, asyncio.StreamWriter] = {}
        self._stopping = asyncio.Event()
        self.pids: dict[int, int] = {}
        """Processes that serve, by number."""

    def stop(self) -> None:
        """Take no more sessions, and end once those that live have ended, or their time is up."""
        self._stopping.set()
        for control in self._controls.values():
            control.write(STOP)

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve; `on_ready` is called once every process takes calls.

        Waits for: `stop`. Unblocked by: it, and the deadline for sessions that live.

        Raises:
            ConfigError: an environment cannot be had.
            AgentRLError: a process cannot be kept up.
        """
        with tempfile.TemporaryDirectory(prefix="agentrl-serve-") as folder:
            ready = [asyncio.Event() for _ in range(self._options.workers)]
            announcing = asyncio.create_task(_announce(ready, on_ready), name="announce")
            try:
                await self._keep_all(folder, ready)
            finally:
                announcing.cancel()

    async def _keep_all(self, folder: str, ready: list[asyncio.Event]) -> None:
        async with asyncio.TaskGroup() as group:
            for worker, is_ready in enumerate(ready):
                group.create_task(self._keep(worker, folder, is_ready))

    async def _keep(self, worker: int, folder: str, is_ready: asyncio.Event) -> None:
        """Start a process, and another one when it dies."""
        failures = 0
        while not self._stopping.is_set():
            process, control = self._spawn()
            self.pids[worker] = process.pid
            try:
                was_up = await self._attend(worker, folder, process, control, is_ready)
            finally:
                self._controls.pop(worker, None)
                kill_group(process)
            if self._stopping.is_set():
                return
            failures = 0 if was_up else failures + 1
            if failures == _STARTS_AT_MOST and not is_ready.is_set():
                raise AgentRLError(f"process {worker} of the server ended {failures} times while it started; see above")
            self._board.bury(worker)
            _log.warning("process %d of the server ended (%s) and is replaced", worker, how_it_ended(process))
            # The others go on, and /health tells of it, for as long as none comes up.
            await asyncio.sleep(min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S))

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        return spawn([*CHILD, WORKER_MODULE], descriptors=[self._listener.fileno(), self._board.descriptor])

    async def _attend(
        self,
        worker: int,
        folder: str,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        is_ready: asyncio.Event,
    ) -> bool:
        """Stay with a process until it ends; returns whether it took calls. Raises ConfigError if the first cannot."""
        reader, writer = await asyncio.open_connection(sock=control)
        spec = WorkerSpec(self._options, worker, self._listener.fileno(), self._board.descriptor, folder)
        try:
            writer.write(codec.to_json(spec) + b"\n")
            async with asyncio.timeout(_START_S):
                line = await reader.readline()
            if not line:
                return False
            error = codec.from_json(line, WorkerReady).error
            if error is not None and is_ready.is_set():
                _log.warning("process %d of the server cannot be replaced: %s", worker, error)
                return False
            if error is not None:
                raise ConfigError(error)
            self._controls[worker] = writer
            is_ready.set()
            if self._stopping.is_set():
                writer.write(STOP)
            await self._end_of(reader)
            with suppress(subprocess.TimeoutExpired):
                await run_in_thread(f"end-{worker}", lambda: process.wait(_EXIT_S))
            return True
        except (ConnectionError, TimeoutError):
            return False
        finally:
            writer.close()

    async def _end_of(self, reader: asyncio.StreamReader) -> None:
        """Waits for: the end of a process. Unblocked by: it, or, once it is to stop, the end of its time for that."""
        reading = asyncio.create_task(reader.read(), name="attend")
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        limit_s = self._options.drain_s + self._options.limits.call_s + _EXIT_S
        with suppress(TimeoutError):
            await asyncio.wait_for(reading, limit_s)


async def serve(options: ServerOptions, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve environments until a signal to stop; `on_ready` is told the address once calls are taken.

    Raises:
        ConfigError: an environment or the port cannot be had, or anybody could come in.
        AgentRLError: a process cannot be kept up.
    """
    check_is_safe(host, options.token)
    with bind(host, port) as listener, StopSignals().installed() as signals:
        server = EnvironmentServer(options, listener)
        address = f"http://{host}:{listener.getsockname()[1]}"
        with signals.telling(server.stop):
            try:
                await server.run(lambda: on_ready(address))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None


def check_is_safe(host: str, token: str | None) -> None:
    """Raises ConfigError if others than this machine's users could come in without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reached by others, who could use the environments; give a --token-file, or "
            "--host 127.0.0.1"
        )


async def _announce(ready: list[asyncio.Event], on_ready: Callable[[], None]) -> None:
    for event in ready:
        await event.wait()
    on_ready()
