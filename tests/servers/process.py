"""A server process: started in a session of its own, waited for, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

LOG_TAIL_CHARACTERS = 6000


class ServerDiedError(AssertionError):
    """A server has ended before the block in which it was needed."""


@contextmanager
def running_server(
    command: Sequence[str], port: int, log: Path, start_s: float, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a command until the block ends; gives its base URL once ``/health`` answers 200.

    Raises AssertionError with the end of the log if it does not start, ServerDiedError if it has died when the block
    ends.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log, start_s)
        yield url
        if process.poll() is not None:
            raise ServerDiedError(f"the server died:\n{tail(log)}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server did not start:\n{tail(log)}"
        if _is_healthy(url):
            return
        time.sleep(0.1)
    raise AssertionError(f"the server did not answer within {start_s:g} s:\n{tail(log)}")


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False
