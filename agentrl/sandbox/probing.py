"""Tries which limits a backend really holds: by commands that break them."""

from __future__ import annotations

from agentrl.sandbox.backend import Backend
from agentrl.sandbox.effects import Capture
from agentrl.sandbox.streams import no_input
from agentrl.types.errors import EpisodeError, deadline
from agentrl.types.sandbox import Command, CommandResult, Ended, Guarantee, SandboxSpec

NO_GROUP = "this process may make no control group for it; run as root, or have one delegated"
_PROBE_S = 60.0
_MOST_BYTES = 4096
# Each script breaks a limit, and ends well only where nobody holds it.
_PROBES: tuple[tuple[Guarantee, SandboxSpec, str, str], ...] = (
    (
        Guarantee.PROCESSES,
        SandboxSpec(processes=4),
        "i=0; while [ $i -lt 12 ]; do sleep 9 & i=$((i+1)); done",
        "a command can start more processes than its limit",
    ),
    (
        Guarantee.MEMORY,
        SandboxSpec(memory_bytes=16 << 20),
        "a=$(head -c 64000000 /dev/zero | tr '\\0' a) && test ${#a} = 64000000",
        NO_GROUP,
    ),
    (
        Guarantee.DISK,
        SandboxSpec(disk_bytes=1 << 20),
        "head -c 4000000 /dev/zero > f",
        "a command can write more than its limit",
    ),
)


async def unheld_limits(backend: Backend) -> dict[Guarantee, str]:
    """The limits that a command can break, and why."""
    missing: dict[Guarantee, str] = {}
    for guarantee, spec, script, reason in _PROBES:
        try:
            is_broken = (await try_script(backend, spec, script)).exit_code == 0
        except EpisodeError as error:
            is_broken, reason = True, error.failure.message
        if is_broken:
            missing[guarantee] = reason
    return missing


async def try_script(backend: Backend, spec: SandboxSpec, script: str) -> CommandResult:
    """What a shell script gives in a sandbox of its own. Raises EpisodeError."""
    place = await backend.create(spec)
    output = Capture(_MOST_BYTES)
    try:
        async with deadline("sandbox.probe", _PROBE_S):
            ended = await place.run(Command(("sh", "-c", script)), no_input(), output)
    finally:
        await place.close()
    return output.result(ended.code, 0.0, Ended.MEMORY if ended.is_out_of_memory else Ended.EXITED)
