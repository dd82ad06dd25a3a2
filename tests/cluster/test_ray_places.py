from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cluster.config import MemberResources, RayRuntimeConfig
from agentrl.cluster.places import RayPlace, RayPlaces
from agentrl.process.place import PlaceLostError, ProcessLaunch, Role
from agentrl.testing.virtual_cluster import NodeShape, VirtualCluster
from agentrl.testing.virtual_machines import VirtualMachine

DEADLINE_S = 120.0
_BEGIN = "import os, socket, sys, time\nfrom agentrl.process.parent import die_with_parent\ndie_with_parent()\n"
_SOCKET = _BEGIN + "s = socket.socket(fileno=int(sys.argv[-1]))\n"
ECHO = _SOCKET + "while data := s.recv(1 << 20): s.sendall(data)\n"
COUNT = _SOCKET + "for n in range(1000): s.sendall(n.to_bytes(4, 'big'))\n"
SLEEP = _BEGIN + "time.sleep(1000)\n"
LIST = """
import contextlib, json, pathlib
found = {}
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
        found[file.parent.name] = file.read_text()
print(json.dumps(found))
"""
ASK = _SOCKET + "while command := s.recv(1 << 16): s.sendall(repr(eval(command)).encode())\n"


def launch(program: str, **settings) -> ProcessLaunch:
    return ProcessLaunch("child", ("-c", program), **settings)


async def streams(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=connection)


async def ask(connection: socket.socket, question: str) -> str:
    """What the child ASK computes."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    await loop.sock_sendall(connection, question.encode())
    async with asyncio.timeout(DEADLINE_S):
        return (await loop.sock_recv(connection, 1 << 16)).decode()


def node_of(cluster: VirtualCluster, place: RayPlace) -> VirtualMachine:
    return next(node for node in cluster.nodes if node.host == place.host)


def run_on(node: VirtualMachine, *command: str) -> str:
    return subprocess.run(node.command(command), capture_output=True, check=True, text=True).stdout


def processes_on(node: VirtualMachine) -> dict[int, str]:
    """Commands of all processes of a node by their ids there, as the kernel lists them; a zombie's is empty."""
    return {int(pid): command for pid, command in json.loads(run_on(node, sys.executable, "-c", LIST)).items()}


def is_on(node: VirtualMachine, words: str) -> bool:
    return any(words in command for command in processes_on(node).values())


async def until(condition) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.1)


async def test_members_of_a_role_are_spread_and_a_gang_is_together(places):
    first, second = await places.take(Role.WORKER, "worker-0"), await places.take(Role.WORKER, "worker-1")
    gang = await places.gang(Role.TRAINER, ["rank-0", "rank-1"])
    assert first.host != second.host
    assert gang[0].host == gang[1].host
    assert gang[0] is not gang[1]


async def test_a_child_is_on_another_machine_in_the_folder_of_the_run(places, cluster):
    place = await places.take(Role.WORKER, "worker-0")
    child = await place.start(launch(ASK))
    found = await ask(child.connection, "os.getcwd(), sorted(os.listdir('/tmp')), os.readlink('/proc/self/ns/net')")
    assert found.startswith(repr((os.getcwd(),))[:-2])
    assert os.readlink("/proc/self/ns/net") not in found
    assert place.host in {node.host for node in cluster.nodes}
    child.connection.close()
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0


async def test_ten_megabytes_come_back_as_they_were_sent(places):
    child = await (await places.take(Role.WORKER, "worker-0")).start(launch(ECHO))
    sent = random.Random(7).randbytes(10_000_000)
    reader, writer = await streams(child.connection)
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.readexactly(len(sent)) == sent
    writer.close()
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0


async def test_a_thousand_small_frames_come_in_order_and_all_before_the_end(places):
    child = await (await places.take(Role.WORKER, "worker-0")).start(launch(COUNT))
    reader, writer = await streams(child.connection)
    async with asyncio.timeout(DEADLINE_S):
        data = await reader.read(-1)
    assert data == b"".join(number.to_bytes(4, "big") for number in range(1000))
    writer.close()


async def test_a_child_that_reads_nothing_holds_up_whoever_sends(places):
    child = await (await places.take(Role.WORKER, "worker-0")).start(launch(SLEEP))
    child.connection.setblocking(False)
    loop, sent = asyncio.get_running_loop(), 0
    with contextlib.suppress(TimeoutError):
        while sent < 1 << 30:
            await asyncio.wait_for(loop.sock_sendall(child.connection, bytes(1 << 20)), 4.0)
            sent += 1 << 20
    assert sent < 64 << 20
    await child.end()
    child.connection.close()


@pytest.mark.parametrize(
    ("program", "code", "words"), [("sys.exit(3)", 3, "exit code 3"), ("os.kill(os.getpid(), 9)", -9, "signal 9")]
)
async def test_a_child_that_ends_is_told_with_its_exit_code_and_its_socket_reads_as_ended(places, program, code, words):
    child = await (await places.take(Role.WORKER, "worker-0")).start(launch(_SOCKET + program))
    reader, writer = await streams(child.connection)
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read(-1) == b""
        assert await child.wait() == code
    assert (child.returncode, child.how_it_ended()) == (code, words)
    writer.close()


async def test_a_signal_reaches_the_child_and_end_kills_what_it_started(places, cluster):
    place = await places.take(Role.WORKER, "worker-0")
    child = await place.start(launch(SLEEP, has_socket=False))
    child.signal(signal.SIGUSR1)
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGUSR1
    parent = _BEGIN + "import subprocess; subprocess.Popen(['sleep', '54321']); time.sleep(1000)"
    family = await place.start(launch(parent, has_socket=False))
    node = node_of(cluster, place)
    await until(lambda: is_on(node, "sleep\x0054321"))
    await family.end()
    assert family.returncode == -signal.SIGKILL
    await until(lambda: not is_on(node, "sleep\x0054321"))


async def test_a_mark_is_read_while_the_child_runs_and_behind_its_end(places):
    program = _BEGIN + (
        "from agentrl.process.running_mark import RunningMark\n"
        "RunningMark(int(sys.argv[-1])).put(b'train-000007-1\\0')\ntime.sleep(1000)"
    )
    child = await (await places.take(Role.WORKER, "worker-0")).start(launch(program, has_socket=False, has_mark=True))
    async with asyncio.timeout(DEADLINE_S):
        while await child.running() is None:
            await asyncio.sleep(0.1)
    await child.end()
    assert await child.running() == "train-000007-1"


async def test_what_cannot_be_started_is_an_error_of_the_system_that_names_the_node(places, shared: Path):
    place = await places.take(Role.WORKER, "worker-0")
    with pytest.raises(FileNotFoundError, match=rf"/no/python \(on node {place.host}\)"):
        await place.start(launch(SLEEP, python="/no/python"))
    log = shared / "child.log"
    child = await place.start(launch(_BEGIN + "print('hello')", has_socket=False, log=str(log)))
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == 0
    assert log.read_text() == "hello\n"


async def test_a_child_ends_with_its_actor_and_the_place_is_lost(places, cluster):
    place = await places.take(Role.WORKER, "worker-0")
    child = await place.start(launch(ECHO + "#13579"))
    node = node_of(cluster, place)
    await until(lambda: is_on(node, "#13579"))

    def actors() -> list[int]:
        return [pid for pid, command in processes_on(node).items() if "ray::ProcessActor" in command]

    await until(lambda: len(actors()) == 1)  # those of earlier tests may be about to end
    run_on(node, "kill", "-9", str(actors()[0]))
    reader, writer = await streams(child.connection)
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read(-1) == b""
        assert await child.wait() == -signal.SIGKILL
    assert place.host in child.how_it_ended()
    await until(lambda: not is_on(node, "#13579"))
    with pytest.raises(PlaceLostError, match=place.host):
        await place.start(launch(ECHO))
    assert await child.running() is None
    await child.end()
    writer.close()


async def test_a_place_that_is_given_back_leaves_no_process_and_its_room_to_the_next(cluster, config):
    places = RayPlaces.open(config.model_copy(update={"workers": MemberResources(cpus=4)}))
    first, second = [await places.take(Role.WORKER, f"worker-{number}") for number in range(2)]
    assert first.host != second.host
    child = await first.start(launch(SLEEP + "#24680", has_socket=False))
    waiting = asyncio.create_task(places.take(Role.WORKER, "worker-2"))
    await first.close()
    await first.close()
    third = await asyncio.wait_for(waiting, DEADLINE_S)
    assert third.host == first.host
    assert await asyncio.wait_for(child.wait(), DEADLINE_S) == -signal.SIGKILL
    await until(lambda: not is_on(node_of(cluster, third), "#24680"))
    await places.close()


async def test_an_engine_without_a_gpu_to_be_had_is_refused_with_what_is_there(cluster, gpus):
    places = RayPlaces.open(gpus)
    with pytest.raises(PlaceLostError, match=rf"1 CPU, 1 GPU, and there is free .*{cluster.nodes[0].host}: \d CPU"):
        await places.take(Role.ENGINE, "engine-0")
    await places.close()


async def test_of_an_elastic_run_a_member_waits_for_room_as_long_as_its_team_has_another(cluster, gpus):
    node = cluster.add_node(NodeShape(gpus=1))
    places = RayPlaces.open(gpus.model_copy(update={"elastic": True, "wait_s": DEADLINE_S}))
    first = await places.take(Role.ENGINE, "engine-0", "engines")
    places.config = places.config.model_copy(update={"wait_s": gpus.wait_s})
    second = asyncio.create_task(places.take(Role.ENGINE, "engine-1", "engines"))
    await asyncio.wait({second}, timeout=3 * gpus.wait_s)
    assert not second.done()
    cluster.kill_node(node)
    with pytest.raises(PlaceLostError, match=first.host):
        await asyncio.wait_for(first.free_port(), DEADLINE_S)
    with pytest.raises(PlaceLostError, match="no room for engine-1 in 3 s"):
        await asyncio.wait_for(second, DEADLINE_S)
    await places.close()


async def spare(cluster: VirtualCluster, config: RayRuntimeConfig) -> tuple[RayPlaces, RayPlace, VirtualMachine]:
    """A place that only a node which joins while it is waited for can give."""
    places = RayPlaces.open(config.model_copy(update={"engines": MemberResources(resources={"spare": 1})}))
    taking = asyncio.create_task(places.take(Role.ENGINE, "engine-0"))
    await asyncio.sleep(0)
    node = cluster.add_node(NodeShape(resources={"spare": 1}))
    place = await asyncio.wait_for(taking, DEADLINE_S)
    assert place.host == node.host
    return places, place, node


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "silent"])
async def test_a_node_that_joins_gives_room_and_is_lost_with_all_on_it(cluster, config, is_killed):
    places, place, node = await spare(cluster, config)
    child = await place.start(launch(ECHO))
    reader, writer = await streams(child.connection)
    writer.write(b"are you there")
    assert await asyncio.wait_for(reader.readexactly(13), DEADLINE_S) == b"are you there"
    if is_killed:
        cluster.kill_node(node)
    else:
        node.unplug()
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read(-1) == b""
        assert await child.wait() == -signal.SIGKILL
    assert place.host in child.how_it_ended()
    with pytest.raises(PlaceLostError, match=place.host):
        await place.free_port()
    await child.end()
    writer.close()
    await places.close()
    if not is_killed:
        cluster.kill_node(node)
