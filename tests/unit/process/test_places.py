"""Places where real processes are started: those of this machine, and those that behave like another's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl import codec
from agentrl.process.local_place import LocalPlace, LocalPlaces
from agentrl.process.place import Place, PlacedProcess, PlaceLostError, ProcessLaunch, Role
from agentrl.process.remote import ChildProcess, ProcessDiedError
from agentrl.testing.processes import is_running
from agentrl.testing.pumped_place import PumpedPlace, PumpedPlaces

pytestmark = pytest.mark.timeout(300)

ECHOES = """
import socket, sys
with socket.socket(fileno=int(sys.argv[-1])) as connection:
    while data := connection.recv(1 << 16):
        connection.sendall(data)
print("said", *sys.argv[1:-1])
"""
HAS_A_CHILD = """
import socket, subprocess, sys
connection = socket.socket(fileno=int(sys.argv[-1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
connection.sendall(f"{child.pid}\\n".encode())
child.wait()
"""
DIES_IN_AN_EPISODE = """
import asyncio, os, sys
from agentrl.process.running_mark import RunningMark
async def dies():
    await asyncio.sleep(0)
    os._exit(3)
async def both():
    mark = RunningMark(int(sys.argv[1]))
    await asyncio.gather(mark.around("train-000001-0", asyncio.sleep(600)), mark.around("train-000002-1", dies()))
asyncio.run(both())
"""
ENDS_WITH_SEVEN = """
import socket, sys
socket.socket(fileno=int(sys.argv[-1])).recv(100)
sys.exit(7)
"""
TELLS_OF_A_SIGNAL = """
import signal, socket, sys, time
connection = socket.socket(fileno=int(sys.argv[-1]))
signal.signal(signal.SIGUSR1, lambda *_: connection.sendall(b"signal\\n"))
connection.sendall(b"up\\n")
while True:
    time.sleep(600)
"""


@pytest.fixture(params=[LocalPlace, PumpedPlace])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    place = request.param()
    yield place
    await place.close()


def launch(code: str, *arguments: str, log: Path | None = None, has_mark: bool = False) -> ProcessLaunch:
    return ProcessLaunch("child", ("-c", code, *arguments), None if log is None else str(log), has_mark=has_mark)


async def line_of(process: PlacedProcess) -> str:
    """Waits for: a line that the process says."""
    process.connection.setblocking(False)
    loop, said = asyncio.get_running_loop(), b""
    while not said.endswith(b"\n"):
        data = await loop.sock_recv(process.connection, 100)
        assert data, "it ended before"
        said += data
    return said.decode().strip()


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_is_said_comes_back_whole_and_hanging_up_is_heard(place: Place, tmp_path: Path) -> None:
    process = await place.start(launch(ECHOES, "a", "b", log=tmp_path / "log"))
    reader, writer = await asyncio.open_connection(sock=process.connection)
    told = os.urandom(3_000_001)
    writer.write(told)
    assert await reader.readexactly(len(told)) == told
    writer.write_eof()
    assert await reader.read() == b""
    assert await process.wait() == 0
    assert (process.returncode, process.how_it_ended()) == (0, "exit code 0")
    assert (tmp_path / "log").read_text() == "said a b\n"
    writer.close()


async def test_a_process_is_killed_with_all_that_it_started(place: Place) -> None:
    process = await place.start(launch(HAS_A_CHILD))
    grandchild = int(await line_of(process))
    assert is_running(grandchild)
    assert process.returncode is None
    await process.end()
    await process.end()
    process.kill()
    assert (await process.wait(), process.how_it_ended()) == (-9, "signal 9")
    assert not is_running(process.pid)
    await until(lambda: not is_running(grandchild))
    assert await asyncio.get_running_loop().sock_recv(process.connection, 100) == b""
    process.connection.close()


async def test_a_local_process_has_ended_when_kill_returns() -> None:
    process = await LocalPlace().start(launch(HAS_A_CHILD))
    grandchild = int(await line_of(process))
    process.kill()
    assert process.returncode == -9
    await until(lambda: not is_running(grandchild))
    process.connection.close()


async def test_an_exit_code_is_told_to_all_who_wait_but_those_who_gave_up(place: Place) -> None:
    process = await place.start(launch(ENDS_WITH_SEVEN))
    waiting = [asyncio.create_task(process.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    process.connection.send(b"end")
    assert await asyncio.gather(*waiting[1:]) == [7, 7]
    assert (process.returncode, process.how_it_ended()) == (7, "exit code 7")
    await process.end()
    process.connection.close()


async def test_the_mark_of_a_process_that_crashed_is_read_before_and_behind_its_burial(place: Place) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    process = await place.start(launch(DIES_IN_AN_EPISODE, has_mark=True))
    assert await process.wait() == 3
    assert await process.running() == "train-000002-1"
    await process.end()
    assert await process.running() == "train-000002-1"
    process.connection.close()
    await place.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_a_signal_comes_to_a_process_and_to_one_that_has_ended_nothing_happens(place: Place) -> None:
    process = await place.start(launch(TELLS_OF_A_SIGNAL))
    assert await line_of(process) == "up"
    process.signal(signal.SIGUSR1)
    assert await line_of(process) == "signal"
    await process.end()
    process.signal(signal.SIGUSR1)
    await asyncio.sleep(0)
    process.connection.close()


async def test_a_process_without_a_socket_gets_no_numbers_but_its_environment(place: Place, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['WEATHER'], os.environ['HOME'])"
    plain = ProcessLaunch("child", ("-c", code, "x"), str(tmp_path / "log"), {"WEATHER": "fair"}, has_socket=False)
    process = await place.start(plain)
    assert await process.wait() == 0
    await process.end()
    assert (tmp_path / "log").read_text() == f"['x'] fair {os.environ['HOME']}\n"


async def test_what_cannot_be_started_leaves_no_descriptor(place: Place, tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="no-python"):
        await place.start(ProcessLaunch("child", ("-c", ""), python="/no-python", has_mark=True))
    with pytest.raises(FileNotFoundError, match="no-folder"):
        await place.start(ProcessLaunch("child", ("-c", ""), str(tmp_path / "no-folder" / "log"), has_mark=True))
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_a_port_of_a_place_can_be_listened_on_at_its_host(place: Place) -> None:
    with socket.create_server((place.host, await place.free_port())) as server:
        assert server.getsockname()[0] == "127.0.0.1"


def test_a_launch_travels_by_the_codec() -> None:
    sent = ProcessLaunch("child", ("-m", "x"), "/log", {"A": "b"}, "/python", has_socket=False, has_mark=True)
    assert codec.decode(codec.encode(sent), ProcessLaunch) == sent


async def test_ranks_of_this_machine_share_its_devices_and_those_of_others_have_their_own() -> None:
    names = ["trainer-main-0", "trainer-main-1"]
    one, other = await LocalPlaces().gang(Role.TRAINER, names)
    assert one is other
    far = PumpedPlaces()
    one, other = await far.gang(Role.TRAINER, names)
    assert one is not other
    assert list(far.taken) == names


async def test_a_child_whose_place_is_lost_has_died_and_nothing_starts_there(tmp_path: Path) -> None:
    place = PumpedPlace()
    served = str(Path(__file__).parent / "served.py")
    child = await ChildProcess.start("calculator", [served], tmp_path / "log", place=place)
    assert await child.call("add", 1, 2, result=int, deadline_s=120) == 3
    place.lose()
    with pytest.raises(ProcessDiedError, match=r"calculator ended \(its place is gone\) during add; end of .*log"):
        await child.call("add", 1, 2, result=int, deadline_s=120)
    assert not child.is_alive
    with pytest.raises(PlaceLostError):
        await ChildProcess.start("calculator", [served], tmp_path / "log", place=place)
    child.kill()
    await place.close()
