"""Commands in sandboxes of the docker backend, and what an engine says of their containers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import docker

from agentrl.sandbox.backend import Place
from agentrl.types.sandbox import Command

IMAGE = "agentrl-python:local"
LABEL = "agentrl.sandbox"
OWN_PROCESSES = 2
MOST_OWN_PROCESSES = 16  # those of the engine, while it starts a command, included
WAIT_S = 90.0


@dataclass
class Recorded:
    """What a command wrote, and how it ended."""

    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    code: int | None = None
    is_out_of_memory: bool = False

    async def stdout(self, data: bytes) -> None:
        self.out += data

    async def stderr(self, data: bytes) -> None:
        self.err += data

    @property
    def text(self) -> str:
        return self.out.decode()


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def run(place: Place, *arguments: str, stdin: bytes = b"", **more) -> Recorded:
    """Run a command to its end."""
    recorded = Recorded()
    async with asyncio.timeout(WAIT_S):
        ended = await place.run(Command(arguments, **more), chunks(stdin), recorded)
    recorded.code, recorded.is_out_of_memory = ended.code, ended.is_out_of_memory
    return recorded


async def shell(place: Place, script: str, **more) -> Recorded:
    return await run(place, "sh", "-c", script, **more)


def containers(engine: docker.APIClient, label: str = LABEL) -> dict[str, str]:
    """Names of containers with a label, and how they are."""
    found = engine.containers(all=True, filters={"label": label})
    return {entry["Names"][0].lstrip("/"): entry["State"] for entry in found}


def only_container(engine: docker.APIClient) -> str:
    """The name of the one that there is."""
    (name,) = containers(engine)
    return name


def processes(engine: docker.APIClient, name: str) -> list[str]:
    """Command lines of all processes of a container, as its machine sees them."""
    return [row[-1] for row in engine.top(name, ps_args="-eo pid,args")["Processes"]]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; ends as soon as it holds."""
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.05)
