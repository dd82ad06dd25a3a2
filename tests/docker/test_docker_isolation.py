from __future__ import annotations

import asyncio

import docker
import pytest

from agentrl.types.sandbox import Guarantee, SandboxSpec
from tests.docker.playing import IMAGE, OWN_PROCESSES, only_container, processes, run, shell

MIB = 1 << 20


async def test_what_is_promised_is_what_the_engine_has(backend):
    promised = {Guarantee(name) for name in ("files", "network", "tree", "processes", "memory", "cpu", "disk")}
    assert backend.guarantees == promised
    assert set(backend.missing) == {Guarantee.ALLOWLIST, Guarantee.GATEWAY}


async def test_commands_have_no_rights(backend):
    status = (await run(await backend.create(SandboxSpec()), "cat", "/proc/self/status")).text
    found = dict(line.split(":\t", 1) for line in status.splitlines())
    assert found["Uid"].split() == ["1000"] * 4
    assert found["Gid"].split() == ["1000"] * 4
    assert {int(found[name], 16) for name in ("CapEff", "CapPrm", "CapAmb")} == {0}
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")


async def test_no_network_is_there(backend):
    place = await backend.create(SandboxSpec())
    interfaces = (await run(place, "cat", "/proc/net/dev")).text.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    connect = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=60)"
    ran = await run(place, "python3", "-c", connect)
    assert b"Network is unreachable" in ran.err


async def test_only_workspace_and_temporary_files_are_written(backend):
    place = await backend.create(SandboxSpec())
    for path in (
        "/x",
        "/usr/x",
        "/etc/x",
        "/bin/x",
        "/etc/hosts",
        "/sys/fs/cgroup/memory/x",
        "/proc/sys/kernel/hostname",
    ):
        assert (await shell(place, f"echo > {path}")).code != 0, path
    script = "printf '#!/bin/sh\\necho ran' > {0}/x && chmod +x {0}/x && {0}/x"
    for folder in ("/workspace", "/tmp"):
        assert (await shell(place, script.format(folder))).text == "ran\n"


async def test_the_machines_files_are_not_there(backend, tmp_path):
    (tmp_path / "secret").write_text("secret")
    ran = await run(await backend.create(SandboxSpec()), "cat", str(tmp_path / "secret"))
    assert ran.code != 0
    assert ran.out == b""


async def test_a_full_disk_is_an_error_and_all_files_together_are_bounded(backend):
    place = await backend.create(SandboxSpec(disk_bytes=16 * MIB))
    fill = "import sys\nwith open(sys.argv[1], 'wb', 0) as f:\n    while f.write(bytes(4096)): pass"
    for path in ("big", "/tmp/big", "/dev/shm/big"):
        ran = await run(place, "python3", "-c", fill, path)
        assert ran.code != 0
        assert b"No space left" in ran.err
    sizes = (await shell(place, "stat -c %s big /tmp/big /dev/shm/big")).text.split()
    assert 10 * MIB < sum(map(int, sizes)) <= 16 * MIB


async def test_empty_files_are_bounded_too(backend):
    place = await backend.create(SandboxSpec(disk_bytes=MIB))
    ran = await run(place, "python3", "-c", "for i in range(10000): open(str(i), 'w').close()")
    assert b"No space left" in ran.err


async def test_a_task_without_limits_on_its_disk_has_one(backend):
    place = await backend.create(SandboxSpec(memory_bytes=64 * MIB))
    ran = await run(place, "python3", "-c", "import os; s = os.statvfs('.'); print(s.f_blocks * s.f_frsize)")
    assert int(ran.text) < 32 * MIB


async def test_limits_are_those_of_the_task(backend, engine):
    await backend.create(SandboxSpec(memory_bytes=64 * MIB, cpus=0.5, processes=20))
    limits = engine.inspect_container(only_container(engine))["HostConfig"]
    assert (limits["Memory"], limits["MemorySwap"], limits["NanoCpus"]) == (64 * MIB, 64 * MIB, 500_000_000)
    assert 20 <= limits["PidsLimit"] <= 36


async def test_processor_time_is_bounded(backend):
    place = await backend.create(SandboxSpec(cpus=0.2))
    spin = "import time; a = time.monotonic()\nwhile time.process_time() < 1: pass\nprint(time.monotonic() - a)"
    assert float((await run(place, "python3", "-c", spin)).text) > 3


async def test_the_containers_own_processes_are_out_of_reach(backend, engine):
    place = await backend.create(SandboxSpec())
    script = """
    for folder in /proc/[0-9]*; do
        if [ $(stat -c %u $folder) = 0 ]; then
            pid=${folder#/proc/}; echo found
            kill -9 $pid && echo killed; kill -STOP $pid && echo stopped
            echo lie > /proc/$pid/fd/1 && echo wrote; echo lie > /proc/$pid/fd/0 && echo fed
            cat /proc/$pid/environ && echo read; echo x > /proc/$pid/mem && echo changed
        fi
    done 2>/dev/null
    """
    assert (await shell(place, script)).text.split() == ["found"] * OWN_PROCESSES
    assert len(processes(engine, only_container(engine))) == OWN_PROCESSES
    assert (await run(place, "echo", "on")).text == "on\n"


ORPHANS = """
import os, time
def fork():
    while True:
        try:
            return os.fork()
        except BlockingIOError:  # as many as there may be; without anybody who takes up orphans it stays so
            time.sleep(0.01)
for _ in range(50):
    if not fork():
        os.fork()
        os._exit(0)
    os.wait()
def is_zombie(pid):
    try:
        return open(f'/proc/{pid}/stat').read().split()[2] == 'Z'
    except OSError:
        return False
while any(is_zombie(pid) for pid in os.listdir('/proc') if pid.isdigit()):
    time.sleep(0.01)
"""


async def test_orphans_are_taken_up(backend):
    place = await backend.create(SandboxSpec(processes=20))
    assert (await run(place, "python3", "-c", ORPHANS)).code == 0


async def test_other_users_than_the_default_are_taken(url):
    from agentrl.sandbox.docker import DockerOptions, definition

    backend = await definition.start(DockerOptions(hosts=(url,), image=IMAGE, user="4321:1234"), "tests")
    try:
        ran = await shell(await backend.create(SandboxSpec()), "id -u; id -g; echo > x; setsid sleep 1000 &")
        assert ran.text == "4321\n1234\n"
        assert ran.code == 0
    finally:
        await backend.close()


@pytest.fixture(scope="module", params=["dash", "bash"])
def other_shell(request: pytest.FixtureRequest, engine: docker.APIClient):
    """An image whose /bin/sh is another one than busybox."""
    made = engine.create_container(
        IMAGE, ["ln", "-sf", request.param, "/bin/sh"], host_config=engine.create_host_config(network_mode="none")
    )
    engine.start(made["Id"])
    assert engine.wait(made["Id"], timeout=60)["StatusCode"] == 0
    name = f"agentrl-{request.param}:local"
    engine.commit(made["Id"], *name.split(":"))
    engine.remove_container(made["Id"], force=True)
    yield name
    engine.remove_image(name, force=True)


async def test_any_shell_will_do(backend, engine, other_shell):
    place = await backend.create(SandboxSpec(image=other_shell, memory_bytes=64 * MIB))
    name = only_container(engine)
    ran = await shell(place, "setsid sleep 1000 & cat; echo error >&2; exit 7", stdin=b"given")
    assert (ran.code, ran.text, ran.err) == (7, "given", b"error\n")
    ran = await shell(place, "kill -9 $$")
    assert (ran.code, ran.out, ran.err) == (137, b"", b"")
    ran = await run(place, "no-such-program")
    assert ran.code == 127
    assert b"no-such-program" in ran.err
    assert (await run(place, "exit", "5")).code == 127
    assert (await run(place, "python3", "-c", "bytearray(1 << 28)")).is_out_of_memory
    running = asyncio.create_task(run(place, "sleep", "1000"))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(processes(engine, name)) == OWN_PROCESSES
