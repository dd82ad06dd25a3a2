"""Programs that run in a sandbox for as long as an episode, and are stopped when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from agentrl.sandbox.client import KeeperHost
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command, Ended, SandboxSpec
from tests.integration.sandbox_hosts import keeper
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
