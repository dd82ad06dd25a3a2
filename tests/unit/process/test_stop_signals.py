"""Signals that a terminal or a cluster sends to all processes of a run at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import pytest

from agentrl.process.parent import STOP_SIGNALS
from agentrl.process.starting import spawn

LIMIT_S = 30.0
CHILD = """
import socket, sys
from agentrl.process.parent import die_with_parent, ignore_stop_signals
{first}
die_with_parent()
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall(b"up")
connection.recv(1)
"""


def _spawn(first: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    process, ours = spawn(["-c", CHILD.format(first=first)])
    ours.settimeout(LIMIT_S)
    return process, ours


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_child_that_leaves_stopping_to_its_parent_outlives_them_from_its_first_moment(number: signal.Signals) -> None:
    process, ours = _spawn("ignore_stop_signals()")
    os.kill(process.pid, number)
    with ours:
        assert ours.recv(2) == b"up"
        os.kill(process.pid, number)
    assert process.wait(LIMIT_S) == 0


def test_another_child_is_stopped_by_them() -> None:
    process, ours = _spawn("")
    os.kill(process.pid, signal.SIGTERM)
    with ours:
        assert ours.recv(2) == b""
    assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_whoever_starts_children_is_stopped_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    process, ours = _spawn("")
    ours.close()
    process.wait(LIMIT_S)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_programs_that_such_a_child_starts_are_stopped_as_ever() -> None:
    process, ours = _spawn(
        "ignore_stop_signals()\n"
        "die_with_parent()\n"
        "import subprocess\n"
        "inner = subprocess.Popen(['sleep', '600'])\n"
        "inner.terminate()\n"
        "assert inner.wait() == -15"
    )
    with ours:
        assert ours.recv(2) == b"up"
    assert process.wait(LIMIT_S) == 0
