"""Attempts to get out of a sandbox, to spoil it for others, or to outlive it, on each backend.

`attempts` and those of them that were `contained`, by backend: bwrap, bwrap without root (whose limits of memory and
processor time are declared missing and so not tried), docker. `left_over` counts processes of theirs, folders, mounts,
control groups and containers that are there afterwards. `escaped_on_local` are those of the harmless attempts that got
out where nothing contains them, which a task has to ask for; `refused_on_local` whether one that does not is refused.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import docker

from agentrl.types.errors import EpisodeError
from tests.benchmarks.report import report
from tests.integration.sandbox_hosts import AS_NOBODY, keeper
from tests.storms.docker_engine import IMAGE, docker_engine
from tests.storms.escape_attempts import ATTEMPTS, HARMLESS, MARKS, SPEC
from tests.storms.escape_targets import Outside, outside, running_with
from tests.storms.escapes import attempt_all

UNLIMITED = replace(SPEC, memory_bytes=None, cpus=None)
TRUSTING = replace(UNLIMITED, processes=None, disk_bytes=None, needs=frozenset())


async def escaped_on_local(targets: Outside) -> tuple[int, bool]:
    """How many harmless attempts get out, and whether a task that asks for protection is refused."""
    num_escaped, is_refused = 0, False
    async with keeper("local") as host:
        try:
            await host.open(SPEC)
        except EpisodeError:
            is_refused = True
        sandbox = await host.open(TRUSTING)
        for attempt in ATTEMPTS:
            if attempt.name in HARMLESS:
                faults, brought = await attempt.act(sandbox, targets)
                num_escaped += bool(faults + targets.faults(brought))
    return num_escaped, is_refused


async def measure(url: str, targets: Outside) -> dict[str, object]:
    """All figures."""
    options = {"hosts": [url], "image": IMAGE}
    found: dict[str, dict[str, list[str]]] = {}
    # Each keeper holds at its end that nothing of it is left on this machine.
    async with keeper() as host:
        found["bwrap"] = await attempt_all(host, targets)
    async with keeper(module=AS_NOBODY) as host:
        found["bwrap_nobody"] = await attempt_all(host, targets, UNLIMITED)
    async with keeper("docker", options=options) as host:
        found["docker"] = await attempt_all(host, targets)
    client = docker.APIClient(url, version="auto")
    containers = client.containers(all=True)
    client.close()
    escaped, is_refused = await escaped_on_local(targets)
    return {
        "attempts": sum(map(len, found.values())),
        "contained": sum(not faults for attempts in found.values() for faults in attempts.values()),
        "by_backend": {name: [sum(not f for f in one.values()), len(one)] for name, one in found.items()},
        "escaped": {name: {a: f for a, f in one.items() if f} for name, one in found.items() if any(one.values())},
        "left_over": len(containers) + sum(len(running_with(mark)) for mark in MARKS),
        "escaped_on_local": escaped,
        "of_harmless": len(HARMLESS),
        "refused_on_local": is_refused,
    }


def main() -> None:
    with (
        docker_engine() as url,
        tempfile.TemporaryDirectory(prefix="outside-", dir="/var/tmp") as folder,
        outside(Path(folder)) as targets,
    ):
        report("sandbox_escape", **asyncio.run(measure(url, targets)))


if __name__ == "__main__":
    main()
