"""A real environment server, started as a person starts it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.testing.environments import faulty
from tests.servers.process import ServerDiedError, tail

raising = dataclasses.replace(faulty, name="raising")
COMMAND = [sys.executable, "-m", "agentrl.cli.main", "env", "serve"]
TOKEN = "sesame"
_START_S = 300.0
_END_S = 120.0
_ADDRESS = re.compile(r"serving .* at (http://\S+);")


@dataclass(frozen=True)
class RunningServer:
    """A server that takes calls."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def workers(self) -> list[int]:
        """The processes that have its sessions, or are to; not those that have ended."""
        return [pid for pid in _children(self.process.pid) if b"agentrl.process.child" in _command(pid)]

    def stop(self) -> int:
        """Tell it to stop in order, as Ctrl-C does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_S)


@contextmanager
def environment_server(
    folder: Path, *arguments: str, token: str | None = TOKEN, command: list[str] = COMMAND
) -> Iterator[RunningServer]:
    """``agentrl env serve ARGUMENTS`` on a port of its own until the block ends; its log is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    log, secret = folder / "server.log", folder / "token"
    secret.write_text(token or "")
    given = [] if token is None else ["--token-file", str(secret)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments, *(() if "--port" in arguments else ("--port", "0")), *given],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield RunningServer(_wait_for_address(process, log), process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if found := _ADDRESS.search(log.read_text(errors="replace")):
            return found[1]
        if process.poll() is not None:
            raise ServerDiedError(f"the server did not start:\n{tail(log)}")
        time.sleep(0.05)
    raise AssertionError(f"the server did not start within {_START_S:g} s:\n{tail(log)}")


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
