"""The first signal to stop is told to the event loop; a second ends the process, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.process.stopping import STOPPED
from agentrl.testing.processes import is_running

LIMIT_S = 120.0
PROGRAM = """
import asyncio, socket, sys, time
from agentrl.process.loop import run_async
from agentrl.process.starting import spawn
from agentrl.process.stopping import StopSignals

class Busy(asyncio.Protocol):
    def data_received(self, data):
        print("busy", flush=True)
        while True:
            try:
                time.sleep(0.001)
            except BaseException:
                pass

def sleep():
    print("busy", flush=True)
    time.sleep(3600)

def spin():
    print("busy", flush=True)
    while True:
        pass

async def callback():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    await asyncio.get_running_loop().create_connection(Busy, sock=ours)
    theirs.sendall(b"x")
    await asyncio.Event().wait()

async def main(doing):
    child, connection = spawn(["-c", "import time; time.sleep(3600)"])
    print(child.pid, flush=True)
    stop = asyncio.Event()
    with StopSignals().installed() as signals, signals.telling(stop.set):
        if doing == "callback":
            await callback()
        elif doing in ("sleep", "spin"):
            globals()[doing]()
        else:
            print("busy", flush=True)
            await stop.wait()
            print("told", flush=True)
            if doing == "lingers":
                await asyncio.Event().wait()
    child.kill()
    print("ended", flush=True)

if sys.argv[2] == "asyncio":
    run_async = asyncio.run
run_async(main(sys.argv[1]))
"""


def start(doing: str, loop: str) -> tuple[subprocess.Popen[str], int]:
    """A process that is busy by now, and the id of its child."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, doing, loop], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "busy\n"
    return process, child


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_told_and_the_process_ends_in_its_own_order(number: signal.Signals, loop: str) -> None:
    process, _ = start("awaits", loop)
    process.send_signal(number)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert (process.returncode, output) == (0, "told\nended\n")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("doing", ["lingers", "callback", "sleep", "spin"])
def test_a_second_ends_the_process_and_its_children_whatever_it_does(doing: str, loop: str) -> None:
    process, child = start(doing, loop)
    until = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < until
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    output = process.communicate()[0]
    assert process.returncode == STOPPED
    assert "ended" not in output
    while is_running(child):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_handlers_are_as_before_behind_the_block() -> None:
    program = """
import asyncio, signal
from agentrl.process.stopping import StopSignals
async def main():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals().installed():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=LIMIT_S).returncode == 0


def test_a_child_that_has_ended_is_not_ended_again(tmp_path: Path) -> None:
    program = """
import os, signal
from agentrl.process import stopping
from agentrl.process.starting import kill_group, spawn
process, connection = spawn(["-c", ""])
assert process.pid in stopping._groups
kill_group(process)
assert not stopping._groups
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=LIMIT_S, env=os.environ).returncode == 0
