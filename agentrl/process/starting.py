"""Starts processes of this machine that lead a group of their own, and kills them for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from agentrl.process.parent import stop_signals_blocked, supervised_environment
from agentrl.process.stopping import forget_group, note_group

_EXIT_S = 2.0


def spawn(
    argv: Sequence[str],
    output: IO[bytes] | None = None,
    environment: dict[str, str] | None = None,
    descriptors: Sequence[int] = (),
    python: str | Path = sys.executable,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``python *argv FD`` as `spawn_alone` does; the socket is the other end of FD.

    Raises:
        OSError: there is no process or no descriptor to be had.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            argv, descriptors = [*argv, str(theirs.fileno())], [theirs.fileno(), *descriptors]
            return spawn_alone(argv, output, environment, descriptors, python), ours
    except BaseException:
        ours.close()
        raise


def spawn_alone(
    argv: Sequence[str],
    output: IO[bytes] | None = None,
    environment: dict[str, str] | None = None,
    descriptors: Sequence[int] = (),
    python: str | Path = sys.executable,
) -> subprocess.Popen[bytes]:
    """Start ``python *argv`` in a process group of its own; it has the same `descriptors` open.

    ``[*CHILD, MODULE]`` ends with this process whatever it does. Signals to stop are held back until a child calls
    `die_with_parent`: before, it may say what is to become of them.
    Without `output` it writes where this process does.

    Raises:
        OSError: there is no process to be had.
    """
    with stop_signals_blocked():
        process = subprocess.Popen(
            [python, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            pass_fds=descriptors,
            start_new_session=True,
            env={**os.environ, **supervised_environment(), **(environment or {})},
        )
    note_group(process.pid)
    return process


def arithmetic_environment(threads: int) -> dict[str, str]:
    """Variables of a process that computes with so many cores, which it may have to share with other processes.

    A thread that waits for the others of its process spins for some microseconds and then sleeps. By OpenMP's default
    it spins on: where one of them has lost its core to another process, the others burn theirs until it is back. With
    two threads beside four busy processes a step took five times as long; on idle cores spinning saves a twentieth.
    """
    spins = os.environ.get("GOMP_SPINCOUNT", "1000")
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": spins}


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Of a process that has ended: by a signal, or with an exit code."""
    code = process.poll()
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its own group, and the group; one that a disk holds ends once that lets it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_S)
    forget_group(process.pid)


def tail(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log file, indented; a missing file reads as such."""
    if not log.exists():
        return "    (no log)"
    lines = log.read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join(f"    {line}" for line in lines) or "    (log is empty)"
