"""The keeper: a process that holds all sandboxes of a run on a machine, for whoever connects to its socket.

Workers that play episodes are killed and replaced; what they were doing in a sandbox goes on here, and the next worker
asks what became of it. The keeper ends all sandboxes when the process that started it closes its control, or dies. Its
parent sends a `KeeperSpec` as a line, and gets a `KeeperReady`, then `KeeperCounts` now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed

from agentrl import codec, registry
from agentrl.config.base import parse_config
from agentrl.process.parent import STOP_SIGNALS, ignore_stop_signals
from agentrl.sandbox.backend import Backend, BackendDefinition
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.files import read_out, take_in
from agentrl.sandbox.table import KeptSandbox, SandboxTable, check_command
from agentrl.sandbox.wire import (
    MOST_FRAME_BYTES,
    Answer,
    Attach,
    Call,
    Close,
    Describe,
    Forget,
    Keep,
    Open,
    Outcome,
    Pack,
    Read,
    Recall,
    Remember,
    Request,
    Run,
    Snapshot,
    Stop,
    Unpack,
    Write,
)
from agentrl.types.errors import AgentRLError, Boundary, ConfigError, EpisodeError, Failure

_TICK_S = 1.0
_MOST_SPEC_BYTES = 1 << 24
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperSpec:
    """The section `sandbox` of a recipe, where to listen, and a name for the run that what is made bears.

    `host` is the machine's address. The folder of `socket` is the keeper's own, and made if it is not there.
    """

    config: dict[str, Any]
    socket: str
    label: str
    host: str


@dataclass(frozen=True, slots=True)
class KeeperReady:
    """That the keeper takes calls, or why it cannot."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class KeeperCounts:
    """What has been counted so far."""

    counts: dict[str, int]


class Service:
    """Answers the calls of one connection after the other; a connection is of one sandbox."""

    def __init__(self, table: SandboxTable) -> None:
        self._table = table

    async def serve(self, connection: ServerConnection) -> None:
        """Waits for: calls. Unblocked by: the end of the connection. Its sandbox lives on."""
        user = _User(self._table, connection)
        try:
            async for frame in connection:
                answer = await _answer(user, frame)
                await connection.send(codec.encode(answer))
        except ConnectionClosed:
            pass
        finally:
            user.leave()


class _User:
    """One connection with its sandbox and token."""

    def __init__(self, table: SandboxTable, connection: ServerConnection) -> None:
        self._table, self._connection = table, connection
        self._kept: KeptSandbox | None = None
        self._token = 0

    def leave(self) -> None:
        if self._kept is not None:
            self._kept.users -= 1
            self._kept.left = time.monotonic()

    async def carry_out(self, call: Request) -> Answer:
        match call:
            case Describe():
                return Answer(guarantees=self._table.backend.guarantees)
            case Forget():
                await self._table.backend.forget(call.snapshot)
                return Answer()
            case Stop():
                await self._table.held(call.handle, call.token).effects.stop(call.effect_id)
                return Answer()
            case Open():
                return self._use(await self._table.open(call.spec, call.snapshot, call.beside), 0)
            case Attach():
                return self._use(self._table.attach(call.handle, call.token), call.token)
            case Write() | Unpack() | Read() | Pack():
                return await self._move_files(call)
        return await self._use_kept(self._present(), call)

    async def _use_kept(self, kept: KeptSandbox, call: Request) -> Answer:
        match call:
            case Run():
                check_command(self._table.backend, call.command)
                return Answer(result=await kept.effects.run(call.effect_id, call.command))
            case Outcome():
                return Answer(result=await kept.effects.outcome(call.effect_id))
            case Snapshot():
                return Answer(text=await self._table.snapshot(kept))
            case Remember():
                kept.state = call.state
                return Answer()
            case Recall():
                return Answer(data=kept.state)
            case Keep():
                kept.is_kept = True
                return Answer()
            case Close():
                await self._table.end(kept)
                return Answer()
        raise AssertionError(call)

    async def _move_files(self, call: Write | Unpack | Read | Pack) -> Answer:
        """Frames first: what the client sends is read to its end whatever becomes of it."""
        if isinstance(call, Write | Unpack):
            await take_in(self._present, call, self._connection)
        else:
            await read_out(self._present, call, self._connection)
        return Answer()

    def _use(self, kept: KeptSandbox, token: int) -> Answer:
        if self._kept is not None:
            raise EpisodeError(Boundary.SANDBOX, "protocol", "this connection has a sandbox already")
        self._kept, self._token = kept, token
        kept.users += 1
        return Answer(text=kept.handle)

    def _present(self) -> KeptSandbox:
        if self._kept is None:
            raise EpisodeError(Boundary.SANDBOX, "protocol", "this connection has no sandbox yet")
        self._kept.check(self._token)
        return self._kept


async def _answer(user: _User, frame: bytes | str) -> Answer:
    try:
        call = msgspec.msgpack.decode(frame.encode() if isinstance(frame, str) else frame, type=Call)
        return await user.carry_out(call)
    except EpisodeError as error:
        return Answer(failure=error.failure)
    except msgspec.MsgspecError as error:
        return Answer(failure=Failure(Boundary.SANDBOX, "protocol", str(error)))
    except OSError as error:  # the machine's: no room, no descriptors, no processes
        return Answer(failure=Failure(Boundary.SANDBOX, "machine", f"{type(error).__name__}: {error}"))


async def start_backend(config: SandboxConfig, label: str) -> Backend:
    """The configured backend. Raises ConfigError if there can be none here."""
    definition = registry.load_plugin(registry.SANDBOXES, config.kind)
    if not isinstance(definition, BackendDefinition):
        raise ConfigError(f"sandbox '{config.kind}' is a {type(definition).__name__}, not a BackendDefinition")
    options = parse_config(definition.options, config.options, f"sandbox.options of '{config.kind}'")
    backend: Backend = await definition.start(options, label)
    return backend


async def keep(spec: KeeperSpec, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hold sandboxes until the parent has ended.

    Waits for: the end of the control connection. Unblocked by: the parent's close, or its death.
    """
    config = parse_config(SandboxConfig, spec.config, "sandbox")
    table = SandboxTable(await start_backend(config, spec.label), config, spec.host)
    Path(spec.socket).parent.mkdir(mode=0o700, exist_ok=True)
    serve = Service(table).serve
    try:
        async with unix_serve(serve, spec.socket, max_size=MOST_FRAME_BYTES, compression=None, ping_interval=None):
            _tell(writer, KeeperReady())
            await _until_end(reader, writer, table)
            # Before the server waits for its connections, which may wait for commands.
            await table.close()
    finally:
        await table.close()
        # Of a parent that was killed nobody else takes it away.
        shutil.rmtree(Path(spec.socket).parent, ignore_errors=True)


async def _until_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, table: SandboxTable) -> None:
    """Look after the sandboxes, and tell the parent what was counted, whenever it has changed."""
    ending = asyncio.create_task(reader.read(), name="parent")
    told: dict[str, int] = {}
    while not ending.done():
        await asyncio.wait({ending}, timeout=_TICK_S)
        await table.end_abandoned()
        if table.counts != told and not ending.done():
            told = dict(table.counts)
            _tell(writer, KeeperCounts(told))


def _tell(writer: asyncio.StreamWriter, said: KeeperReady | KeeperCounts) -> None:
    writer.write(codec.to_json(said) + b"\n")


async def _main(fd: int) -> None:
    control = socket.socket(fileno=fd)
    reader, writer = await asyncio.open_connection(sock=control, limit=_MOST_SPEC_BYTES)
    line = await reader.readline()
    if not line:
        return
    try:
        await keep(codec.from_json(line, KeeperSpec), reader, writer)
    except AgentRLError as error:
        _tell(writer, KeeperReady(error=str(error)))
        with contextlib.suppress(ConnectionError):
            await writer.drain()


def main() -> None:
    """Entry of the process: ``python -m agentrl.sandbox.keeper FD``."""
    # It outlives its parent for as long as it needs to end what it holds.
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.pop("AGENTRL_PARENT_PID", None)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    # Not uvloop, which starts no program under another user id.
    asyncio.run(_main(int(sys.argv[1])))


if __name__ == "__main__":
    main()
