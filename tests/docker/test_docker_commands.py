from __future__ import annotations

import asyncio
import hashlib
import time

import pytest

from agentrl.sandbox import docker_place, docker_watcher
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command, SandboxSpec
from tests.docker.playing import (
    MOST_OWN_PROCESSES,
    OWN_PROCESSES,
    Recorded,
    chunks,
    containers,
    only_container,
    processes,
    run,
    shell,
    until,
)

BOUNDED = SandboxSpec(memory_bytes=64 << 20, processes=32, disk_bytes=16 << 20, cpus=0.5)


async def test_stdout_and_stderr_come_apart_and_whole(backend):
    place = await backend.create(SandboxSpec())
    script = "i=0; while [ $i -lt 20000 ]; do echo out$i; echo err$i >&2; i=$((i+1)); done"
    ran = await shell(place, script)
    assert ran.code == 0
    assert ran.text == "".join(f"out{i}\n" for i in range(20000))
    assert ran.err.decode() == "".join(f"err{i}\n" for i in range(20000))


async def test_stdin_reaches_the_command_and_ends(backend):
    place = await backend.create(SandboxSpec())
    data = bytes(range(256)) * 8192
    ran = await run(place, "sha256sum", stdin=data)
    assert ran.text.split()[0] == hashlib.sha256(data).hexdigest()


async def test_a_command_may_leave_its_input_unread(backend):
    place = await backend.create(SandboxSpec())

    async def endless():
        while True:
            yield b"x" * 65536

    ended = await asyncio.wait_for(place.run(Command(("true",)), endless(), Recorded()), 90)
    assert ended.code == 0


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill $$", 143)])
async def test_exit_codes_are_the_commands(backend, script, code):
    ran = await shell(await backend.create(SandboxSpec()), script)
    assert (ran.code, ran.err) == (code, b"")


async def test_a_program_that_is_not_there_ends_with_127_and_says_so_on_stderr(backend):
    ran = await run(await backend.create(SandboxSpec()), "no-such-program", "-x")
    assert (ran.code, ran.out) == (127, b"")
    assert b"no-such-program" in ran.err


async def test_a_program_named_like_a_word_of_the_shell_is_no_builtin(backend):
    ran = await run(await backend.create(SandboxSpec()), "exit", "5")
    assert ran.code == 127


async def test_a_command_that_prints_the_engines_words_is_no_failure_of_the_engine(backend):
    ran = await run(await backend.create(SandboxSpec()), "printf", "OCI runtime exec failed: exec failed")
    assert (ran.code, ran.text) == (0, "OCI runtime exec failed: exec failed")


async def test_arguments_that_no_kernel_takes_are_refused(backend):
    place = await backend.create(SandboxSpec())
    for arguments in (("echo", "a\0b"), ("echo", "x" * (1 << 17))):
        with pytest.raises(EpisodeError) as raised:
            await run(place, *arguments)
        assert raised.value.failure.kind == "start"
    assert (await run(place, "echo", "x" * ((1 << 17) - 1))).code == 0


async def test_folder_and_environment_are_the_commands(backend):
    place = await backend.create(SandboxSpec(environment={"BOTH": "task", "TASK": "1"}))
    ran = await shell(place, "pwd; echo $BOTH $TASK", folder="/tmp", environment={"BOTH": "command"})
    assert ran.text == "/tmp\ncommand 1\n"
    assert (await run(place, "pwd")).text == "/workspace\n"
    assert (await run(place, "pwd", folder="/nowhere")).code == 126


async def test_a_command_waits_for_whoever_takes_its_output(backend, engine):
    """Its progress stands still far from its end until somebody reads on."""
    place = await backend.create(SandboxSpec())
    gate, begun, total = asyncio.Event(), asyncio.Event(), 256

    class Slow(Recorded):
        async def stdout(self, data: bytes) -> None:
            begun.set()
            await gate.wait()
            await super().stdout(data)

    script = f"i=0; while [ $i -lt {total} ]; do head -c 262144 /dev/zero; i=$((i+1)); echo $i > /tmp/progress; done"
    slow = Slow()
    running = asyncio.create_task(place.run(Command(("sh", "-c", script)), chunks(), slow))
    await asyncio.wait_for(begun.wait(), 90)
    name = only_container(engine)

    def progress() -> bytes:
        made = engine.exec_create(name, ["cat", "/tmp/progress"], user="1000:1000")
        return engine.exec_start(made["Id"])

    before = None
    while (now := await asyncio.to_thread(progress)) != before or not now.strip().isdigit():
        before = now
        await asyncio.sleep(2)
    assert int(now) < total
    gate.set()
    assert (await asyncio.wait_for(running, 90)).code == 0
    assert len(slow.out) == total << 18


async def test_what_a_command_leaves_running_ends_with_it(backend, engine):
    place = await backend.create(SandboxSpec())
    ran = await shell(place, "setsid sleep 1000 & sleep 1000 >/dev/null 2>&1 & echo begun; exit 4")
    assert (ran.code, ran.text) == (4, "begun\n")
    assert len(processes(engine, only_container(engine))) == OWN_PROCESSES


async def test_a_command_that_kills_its_shell_leaves_nothing_either(backend, engine):
    place = await backend.create(SandboxSpec())
    ran = await shell(place, "setsid sleep 1000 & kill -9 $PPID; echo written; sleep 1000")
    assert (ran.code, ran.text) == (137, "written\n")
    assert len(processes(engine, only_container(engine))) == OWN_PROCESSES


async def test_a_cancelled_command_ends_with_all_that_it_started(backend, engine):
    place = await backend.create(SandboxSpec())
    begun, name = Recorded(), only_container(engine)
    script = "setsid sleep 1000 & sleep 1000 & echo begun; sleep 1000"
    running = asyncio.create_task(place.run(Command(("sh", "-c", script)), chunks(), begun))
    await until(lambda: bool(begun.out), "the command has begun")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(processes(engine, name)) == OWN_PROCESSES
    assert (await run(place, "echo", "on")).text == "on\n"


async def test_a_command_that_is_cancelled_while_it_starts_does_not_run_afterwards(backend, engine):
    place = await backend.create(SandboxSpec())
    name = only_container(engine)
    for moment in range(12):
        running = asyncio.create_task(place.run(Command(("sleep", "1000")), chunks(), Recorded()))
        await asyncio.sleep(moment * 0.006)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(processes(engine, name)) == OWN_PROCESSES
    assert (await run(place, "true")).code == 0


async def test_an_output_that_fails_ends_the_command(backend, engine):
    place = await backend.create(SandboxSpec())

    class Failing(Recorded):
        async def stdout(self, data: bytes) -> None:
            raise ConnectionResetError("the reader is gone")

    with pytest.raises(ConnectionResetError):
        await place.run(Command(("sh", "-c", "echo x; sleep 1000")), chunks(), Failing())
    assert len(processes(engine, only_container(engine))) == OWN_PROCESSES


async def test_a_command_costs_one_exec(backend, engine):
    place = await backend.create(SandboxSpec())
    name, since = only_container(engine), time.time() - 1
    for _ in range(3):
        await shell(place, "setsid sleep 1000 & true")
    events = engine.events(since=since, until=time.time(), filters={"container": name}, decode=True)
    assert sum(event["Action"].startswith("exec_create") for event in events) == 3


@pytest.mark.parametrize("script", ["exec python3 -c '{}'", "python3 -c '{}'; exit 0", "python3 -c '{}' & wait"])
async def test_a_kill_for_memory_is_told(backend, script):
    place = await backend.create(BOUNDED)
    assert not (await run(place, "true")).is_out_of_memory
    assert (await shell(place, script.format("bytearray(1 << 28)"))).is_out_of_memory
    assert not (await shell(place, "kill -9 $$")).is_out_of_memory


BOMB = """
import os
print("lit", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


async def test_a_fork_bomb_is_contained_and_cleared(backend, engine):
    place = await backend.create(BOUNDED)
    name, recorded, seen = only_container(engine), Recorded(), []
    running = asyncio.create_task(place.run(Command(("python3", "-c", BOMB)), chunks(), recorded))
    await until(lambda: bool(recorded.out), "the bomb is lit")
    await until(lambda: seen.append(len(processes(engine, name))) or seen[-1] > 32, "the bomb has grown")
    seen += [len(processes(engine, name)) for _ in range(3)]
    assert max(seen) <= 32 + MOST_OWN_PROCESSES
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(processes(engine, name)) == OWN_PROCESSES
    assert (await run(place, "true")).code == 0


async def test_a_fork_bomb_behind_a_command_that_has_ended_is_cleared(backend, engine):
    place = await backend.create(BOUNDED)
    bomb = f"import os, sys\nif os.fork():\n    os.kill(os.getppid(), 9)\n    sys.exit(3)\n{BOMB}"
    assert (await run(place, "python3", "-c", bomb)).code == 137
    assert len(processes(engine, only_container(engine))) == OWN_PROCESSES
    assert (await run(place, "true")).code == 0


async def test_a_container_whose_processes_cannot_be_ended_is_removed(backend, engine, monkeypatch):
    """As on an engine that gives the container's own process no right to kill."""
    monkeypatch.setattr(docker_watcher, "RIGHTS", ())
    monkeypatch.setattr(docker_place, "_KILL_S", 2.0)
    place = await backend.create(SandboxSpec())
    recorded = Recorded()
    running = asyncio.create_task(place.run(Command(("sh", "-c", "echo begun; sleep 1000")), chunks(), recorded))
    await until(lambda: bool(recorded.out), "the command has begun")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: containers(engine) == {}, "the container is gone")
    with pytest.raises(EpisodeError, match="could not be ended") as raised:
        await run(place, "true")
    assert raised.value.failure.kind == "lost"


async def test_few_processes_are_enough_for_a_command(backend):
    place = await backend.create(SandboxSpec(processes=4))
    for _ in range(10):
        assert (await shell(place, "true | true | cat")).code == 0


async def test_a_container_that_is_removed_from_outside_is_lost(backend, engine):
    place = await backend.create(SandboxSpec())
    recorded = Recorded()
    running = asyncio.create_task(place.run(Command(("sh", "-c", "echo begun; sleep 1000")), chunks(), recorded))
    await until(lambda: bool(recorded.out), "the command has begun")
    engine.remove_container(only_container(engine), force=True)
    for call in (running, run(place, "true")):
        with pytest.raises(EpisodeError) as raised:
            await asyncio.wait_for(call, 90)
        assert raised.value.failure.kind == "lost"
