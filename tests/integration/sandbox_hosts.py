"""Keepers of sandboxes for tests, and what they may have left when they are gone."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.sandbox import starting
from agentrl.sandbox.cgroups import ROOT
from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.types.sandbox import SandboxSpec

PLACES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
AS_NOBODY = "tests.storms.as_nobody"
ALL_LIMITS = SandboxSpec(memory_bytes=64 << 20, processes=32, disk_bytes=16 << 20, cpus=1.0)


@asynccontextmanager
async def keeper(kind: str = "bwrap", module: str | None = None, **settings: object) -> AsyncIterator[KeeperHost]:
    """A keeper with sandboxes of a kind, of which nothing may be left at the end.

    It is started by another module than the usual one if one is named. Its temporary files are in a folder of its own,
    whose name is short enough for a socket.
    """
    config = SandboxConfig.model_validate({"kind": kind, **settings})
    with tempfile.TemporaryDirectory(prefix="keeper-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o777)
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        if module is not None:
            patch.setattr(starting, "MODULE", module)
        async with starting.sandboxes(config, "test") as process:
            await process.start()
            pid = process.pid
            yield KeeperHost.of_run()
        assert traces(Path(folder), pid) == []


def traces(folder: Path, pid: int) -> list[str]:
    """What a keeper has on a machine: files in its folder of temporary ones, mounts below it, control groups."""
    roots = [path for place in (folder, *PLACES) for path in place.glob(f"agentrl-*-{pid}-*")]
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]
    groups = [str(path) for path in ROOT.glob(f"*/**/agentrl-{pid}-*")] if ROOT.is_dir() else []
    return [*map(str, (*folder.iterdir(), *roots)), *mounts, *groups]


async def chunks(*data: bytes) -> AsyncIterable[bytes]:
    """What is to be written, in pieces."""
    for chunk in data:
        yield chunk
