"""Starts a keeper and ends it with all its sandboxes."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

from agentrl import codec
from agentrl.process.remote import how_it_ended, kill_group, spawn, tail
from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.keeper import KeeperReady, KeeperSpec
from agentrl.sandbox.wire import SOCKET_VARIABLE
from agentrl.types.errors import ConfigError

MODULE = "agentrl.sandbox.keeper"
_START_S, _END_S = 180.0, 60.0
# numpy's threads would keep the keeper from entering namespaces of its own.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@asynccontextmanager
async def running_keeper(config: SandboxConfig, label: str, log: Path | None = None) -> AsyncIterator[KeeperHost]:
    """The sandboxes of a keeper, for the block; processes that are started meanwhile find it, too.

    Waits for: the backend, at the start; and for the end of its sandboxes, at the end. Unblocked by: these, or minutes.

    Raises:
        ConfigError: there can be no such sandboxes here; says what to do.
    """
    with nullcontext() if log is None else log.open("ab") as output:
        process, control = spawn(["-m", MODULE], output, _ONE_THREAD)
    reader, writer = await asyncio.open_connection(sock=control)
    before = os.environ.get(SOCKET_VARIABLE)
    try:
        ready = await _ready(KeeperSpec(config.model_dump(mode="json"), label), process, reader, writer, log)
        os.environ[SOCKET_VARIABLE] = ready.socket
        yield KeeperHost(Path(ready.socket), ready.guarantees)
    finally:
        if before is None:
            os.environ.pop(SOCKET_VARIABLE, None)
        else:
            os.environ[SOCKET_VARIABLE] = before
        writer.close()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _END_S)
        kill_group(process)


async def _ready(
    spec: KeeperSpec,
    process: subprocess.Popen[bytes],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    log: Path | None,
) -> KeeperReady:
    writer.write(codec.to_json(spec) + b"\n")
    try:
        async with asyncio.timeout(_START_S):
            line = await reader.readline()
    except TimeoutError:
        raise ConfigError(f"the keeper of sandboxes was not ready within {_START_S:g} s") from None
    if not line:
        said = "its last words are above" if log is None else f"end of {log}:\n{tail(log)}"
        raise ConfigError(f"the keeper of sandboxes ended at its start ({how_it_ended(process)}); {said}")
    ready = codec.from_json(line, KeeperReady)
    if ready.error is not None:
        raise ConfigError(ready.error)
    return ready
