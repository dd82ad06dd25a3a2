"""Messages to child processes that are too large for the event loop to send."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import termios
import threading
from pathlib import Path

import numpy as np
import pytest
from served import Column

from agentrl.process.outlet import Outlet
from agentrl.process.remote import ChildProcess, ProcessDiedError

ARGV = [str(Path(__file__).with_name("served.py"))]
LARGE = Column(np.arange(2_000_000, dtype=np.float64), "large")


def sending() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("send-")]


def unread_bytes(child: ChildProcess) -> int:
    """Of what was sent to a child, as the kernel counts."""
    return struct.unpack("i", fcntl.ioctl(child._outlet._socket, termios.TIOCOUTQ, bytes(4)))[0]


async def until_nothing_is_sent() -> None:
    async with asyncio.timeout(10):
        while sending():
            await asyncio.sleep(0.01)


async def test_a_large_message_arrives_whole_and_small_ones_behind_it_too(tmp_path: Path) -> None:
    child = await ChildProcess.start("calculator", ARGV, tmp_path / "log")
    for _ in range(2):
        doubled = await child.call("double", LARGE, result=Column, deadline_s=60)
        assert (doubled.values == 2 * LARGE.values).all()
        assert await child.call("add", 2, 3, result=int, deadline_s=60) == 5
    await child.close()
    assert not sending()


async def test_a_child_that_reads_nothing_costs_its_deadline_and_killing_it_ends_the_thread(tmp_path: Path) -> None:
    child = await ChildProcess.start("calculator", ARGV, tmp_path / "log")
    assert await child.call("add", 2, 3, result=int, deadline_s=60) == 5
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        await child.call("double", LARGE, result=Column, deadline_s=0.2)
    assert sending() == ["send-calculator"]
    child.kill()
    await until_nothing_is_sent()


async def test_a_call_behind_one_that_was_given_up_on_its_way_waits_for_its_rest(tmp_path: Path) -> None:
    child = await ChildProcess.start("calculator", ARGV, tmp_path / "log")
    assert await child.call("add", 2, 3, result=int, deadline_s=60) == 5
    os.kill(child.pid, signal.SIGSTOP)
    given_up = asyncio.create_task(child.call("double", LARGE, result=Column, deadline_s=60))
    while not unread_bytes(child):
        await asyncio.sleep(0.01)
    given_up.cancel()
    await asyncio.wait([given_up])
    adding = asyncio.create_task(child.call("add", 3, 3, result=int, deadline_s=60))
    await asyncio.sleep(0)
    os.kill(child.pid, signal.SIGCONT)
    assert await adding == 6
    await child.close()


async def test_a_child_that_dies_in_the_middle_of_a_message_is_named(tmp_path: Path) -> None:
    child = await ChildProcess.start("calculator", ARGV, tmp_path / "log")
    assert await child.call("add", 2, 3, result=int, deadline_s=60) == 5
    os.kill(child.pid, signal.SIGSTOP)
    calling = asyncio.create_task(child.call("double", LARGE, result=Column, deadline_s=60))
    while not sending():
        await asyncio.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ProcessDiedError, match=r"process calculator ended \(signal 9\) during double"):
        await calling
    child.kill()


def test_nothing_is_sent_once_it_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outlet = Outlet(ours)
        outlet.send(b"ab", b"c")
        assert theirs.recv(10) == b"abc"
        outlet.close()
        outlet.close()
        assert theirs.recv(10) == b"", "the other end does not hear of the end"
        with pytest.raises(ConnectionError):
            outlet.send(b"d")
