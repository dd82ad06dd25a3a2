"""Attempts to get out of a sandbox, to spoil it for others, or to outlive it; each is judged from outside.

Outside there is a file with a secret, one that must stay as it is, a listener on loopback and one on an abstract
socket, and a process. An attempt has got out if its secret shows, the file has changed, the listener was reached or the
process is gone; some are judged by what they themselves report.
"""

from __future__ import annotations

import asyncio
import secrets

from agentrl.protocols import Sandbox
from agentrl.sandbox.client import KeeperHost
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command, SandboxSpec
from tests.storms.escape_attempts import ATTEMPTS, MARKS, MEMORY_ATTEMPTS, SPEC
from tests.storms.escape_targets import Outside


async def attempt_all(host: KeeperHost, targets: Outside, spec: SandboxSpec = SPEC) -> dict[str, list[str]]:
    """What each attempt achieved: an empty list is right. Each has a sandbox of its own; limits are as `spec` asks."""
    found: dict[str, list[str]] = {}
    for attempt in ATTEMPTS:
        if attempt.name in MEMORY_ATTEMPTS and spec.memory_bytes is None:
            continue
        sandbox = await host.open(spec)
        try:
            faults, brought = await attempt.act(sandbox, targets)
            found[attempt.name] = faults + targets.faults(brought) + await _later_faults(sandbox)
        finally:
            await sandbox.close()
    found["left_by_another"] = await _left_by_another(host, spec)
    return found


async def _later_faults(sandbox: Sandbox) -> list[str]:
    """Whether the sandbox is still of use, and what runs in it: a shell and what it asks, nothing of before."""
    count = "ls /proc | grep -c '^[0-9]'; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    try:
        result = await sandbox.run(Command(("sh", "-c", count), timeout_s=60), secrets.token_hex(8))
    except EpisodeError as error:
        return [] if error.failure.kind == "lost" else [f"the sandbox broke: {error}"]
    words = result.stdout.decode(errors="replace")
    return [f"its process lives on: {word}" for word in (*MARKS, "b | b") if word in words.split("grep")[0]]


async def _left_by_another(host: KeeperHost, spec: SandboxSpec) -> list[str]:
    """What one sandbox leaves behind that another one sees: files, programs, processes, variables."""
    first, second = await host.open(spec), await host.open(spec)
    try:
        spoil = "echo evil > /tmp/left; echo 'echo evil' > ls; chmod +x ls; echo 'echo evil' > .profile"
        await first.run(Command(("sh", "-c", spoil)), "spoil")
        look = "ls -a /tmp /workspace /dev/shm; cat /tmp/left .profile; ls"
        seen = await second.run(Command(("sh", "-c", look)), "look")
        return ["it sees what another left"] if b"evil" in seen.stdout or b"left" in seen.stdout else []
    finally:
        await asyncio.gather(first.close(), second.close())
