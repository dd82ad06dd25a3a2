"""Programs that run in a sandbox for as long as an episode, and are stopped when it is over."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.config.base import parse_config
from agentrl.sandbox.bwrap import BwrapOptions
from agentrl.sandbox.client import KeeperHost
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.sandbox import Command, Ended, SandboxSpec
from tests.integration.sandbox_hosts import AS_NOBODY, keeper
from tests.storms.escape_targets import running_with

pytestmark = pytest.mark.timeout(600)
TRUSTED = SandboxSpec(needs=frozenset())


@pytest_asyncio.fixture(params=["bwrap", "local"])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[KeeperHost]:
    async with keeper(request.param) as running:
        yield running


def sh(script: str, **fields: object) -> Command:
    return Command(("sh", "-c", script), **fields)  # type: ignore[arg-type]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.05)


async def test_a_program_that_is_stopped_ends_with_all_that_it_started(host: KeeperHost) -> None:
    sandbox = await host.open(TRUSTED)
    program = sh("echo begun; sleep 4721 & sleep 4722", timeout_s=3600)
    running = asyncio.create_task(sandbox.run(program, "program"))
    await until(lambda: bool(running_with("4721")) and bool(running_with("4722")))
    await sandbox.stop("program")
    assert not running_with("4721")
    assert not running_with("4722")
    result = await running
    assert (result.ended, result.exit_code, result.stdout) == (Ended.STOPPED, 137, b"begun\n")
    await sandbox.stop("program")
    assert await sandbox.run(program, "program") == result
    assert await sandbox.outcome("program") == result
    assert (await sandbox.run(sh("echo on"), "another")).stdout == b"on\n"


async def test_a_program_is_stopped_by_who_has_its_sandbox_and_by_nobody_else(host: KeeperHost) -> None:
    lost = await host.open(TRUSTED)
    running = asyncio.create_task(lost.run(sh("sleep 4723", timeout_s=3600), "program"))
    await until(lambda: bool(running_with("4723")))
    newer = await host.attach(lost.handle(), 1)
    with pytest.raises(EpisodeError, match="fenced"):
        await lost.stop("program")
    assert running_with("4723")
    await newer.stop("program")
    assert (await running).ended is Ended.STOPPED
    await newer.close()
    with pytest.raises(EpisodeError, match="lives here any more"):
        await newer.stop("program")


async def test_a_sandbox_is_not_abandoned_while_somebody_waits_for_its_program() -> None:
    async with keeper("local", abandoned_s=0.01) as host:
        left, used = await host.open(TRUSTED), await host.open(TRUSTED)
        running = asyncio.create_task(used.run(sh("sleep 4724", timeout_s=3600), "program"))
        await until(lambda: bool(running_with("4724")))
        await left.keep()
        await left.detach()
        await left.close()
        async with asyncio.timeout(120):
            while await _lives(host, left.handle()):
                await asyncio.sleep(0.05)
        assert running_with("4724")
        await used.stop("program")
        assert (await running).ended is Ended.STOPPED


async def _lives(host: KeeperHost, handle: str) -> bool:
    """Whether there is such a sandbox, asked without becoming its user for long."""
    try:
        sandbox = await host.attach(handle, 1)
    except EpisodeError:
        return False
    await sandbox.detach()
    await sandbox.close()
    return True


async def test_a_program_may_write_into_its_home(host: KeeperHost) -> None:
    sandbox = await host.open(TRUSTED)
    script = "mkdir -p ~/.config/agent && echo kept > ~/.config/agent/settings && cd $HOME && test -w ."
    assert (await sandbox.run(sh(script), "1")).exit_code == 0
    assert (await sandbox.run(sh("cat ~/.config/agent/settings"), "2")).stdout == b"kept\n"


async def test_without_isolation_no_list_of_addresses_holds() -> None:
    async with keeper("local") as host:
        with pytest.raises(EpisodeError, match="allowlist"):
            await host.open(SandboxSpec(allow=("127.0.0.1:80",), needs=frozenset()))


@pytest.mark.parametrize("module", [None, AS_NOBODY], ids=["root", "nobody"])
@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"])
async def test_programs_of_folders_that_are_shown_can_be_run_and_not_be_changed(place: str, module: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="shown-", dir=place) as folder:
        Path(folder).chmod(0o755)
        program, secret = Path(folder, "tools", "bin", "agent"), Path(folder, "secret")
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho at work\n")
        program.chmod(0o755)
        secret.write_text("the answer")
        async with keeper("bwrap", module, options={"read_only": [f"{folder}/tools"]}) as host:
            sandbox = await host.open(SandboxSpec())
            for number in range(2):
                seen = await sandbox.run(sh(f"{program}; ls {folder}"), f"run {number}")
                assert (seen.stdout, seen.stderr) == (b"at work\ntools\n", b"")
            changed = await sandbox.run(sh(f"rm -f {program}; echo x > {program}"), "change")
            assert b"Read-only file system" in changed.stderr
        assert program.read_text() == "#!/bin/sh\necho at work\n"


async def test_what_only_root_can_enter_is_shown_all_the_same_and_is_there_when_the_keeper_has_ended() -> None:
    with tempfile.TemporaryDirectory(prefix="shown-", dir="/tmp") as folder:
        inner, file = Path(folder, "inner"), Path(folder, "file")
        inner.mkdir()
        Path(inner, "kept").write_text("kept")
        file.write_text("alone")
        Path(folder).chmod(0o700)
        async with keeper("bwrap", options={"read_only": [str(inner), str(file)]}) as host:
            sandbox = await host.open(SandboxSpec())
            seen = await sandbox.run(sh(f"cat {inner}/kept {file}; rm -rf {folder}"), "1")
            assert seen.stdout == b"keptalone"
            assert b"Read-only file system" in seen.stderr
        assert [Path(inner, "kept").read_text(), file.read_text()] == ["kept", "alone"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tools", "is not absolute"),
        ("/usr/../root", "is not absolute"),
        ("/no/such/tools", "is not there"),
        ("/", "a sandbox has /dev, /proc, /sys, /tmp, /workspace of its own"),
        ("/tmp", "a sandbox has /tmp of its own"),
        ("/proc/self", "a sandbox has /proc of its own"),
        ("/dev/shm", "a sandbox has /dev of its own"),
    ],
)
def test_what_cannot_be_shown_is_refused(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(BwrapOptions, {"read_only": [path]}, "sandbox.options of 'bwrap'")
