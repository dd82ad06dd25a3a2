"""Ties a child process to the life of its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_PARENT = "AGENTRL_PARENT_PID"
CHILD = ("-m", "agentrl.process.child")
"""Arguments of a Python before the name of the module that is to be a child of this process."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What a terminal or a cluster sends to all processes of a run at once."""


def supervised_environment() -> dict[str, str]:
    """What a child that is to die with this process needs in its environment."""
    return {_PARENT: str(os.getpid())}


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """A child that is started meanwhile gets none of these signals before it asks for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Go on where all processes of a run are told to stop: the run decides what it still needs of this one.

    Programs that this process starts are stopped as ever: a handler is not handed on to them.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, however it ends; Linux only.

    Who has ended before that is seen by the new parent, process 1 as a rule. In a container the one that started this
    may be process 1 itself, so it says who it is. Signals to stop, which `spawn` has held back, come from now on. A
    second call changes nothing.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    expected = os.environ.pop(_PARENT, None)
    if not sys.platform.startswith("linux"):
        return
    prctl, wished = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    prctl(_PR_GET_PDEATHSIG, ctypes.byref(wished))
    if wished.value == signal.SIGKILL:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.getppid()
    if (parent == 1) if expected is None else (parent != int(expected)):
        sys.exit("the parent process ended before this one was up")
