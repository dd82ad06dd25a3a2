"""Sandboxes in memory, for tests of what is built around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from agentrl.sandbox.backend import Exit, Output
from agentrl.types.sandbox import Command, Guarantee, SandboxSpec


@dataclass(slots=True, eq=False)
class ScriptedPlace:
    """A place whose commands do nothing but what their names say.

    ``say WORDS`` writes them, ``fail N`` ends with N, ``hang`` waits until it is killed; `commands` has all that were
    begun, `killed` counts those that were ended from outside.
    """

    spec: SandboxSpec
    commands: list[tuple[str, ...]] = field(default_factory=list)
    killed: int = 0
    is_closed: bool = False
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a command hangs."""

    async def run(self, command: Command, stdin: AsyncIterator[bytes], output: Output) -> Exit:
        """Do what the command's first word says."""
        self.commands.append(command.arguments)
        what, *words = command.arguments
        if what == "hang":
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.killed += 1
        if what == "say":
            await output.stdout(" ".join(words).encode())
        return Exit(int(words[0]) if what == "fail" else 0)

    async def snapshot(self, name: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Note it."""
        self.is_closed = True


@dataclass(slots=True)
class ScriptedBackend:
    """Makes scripted places, which it lists in `made`."""

    guarantees: frozenset[Guarantee] = frozenset(Guarantee)
    missing: Mapping[Guarantee, str] = field(default_factory=dict)
    made: list[ScriptedPlace] = field(default_factory=list)

    async def create(self, spec: SandboxSpec, snapshot: str | None = None) -> ScriptedPlace:
        """One more."""
        place = ScriptedPlace(spec)
        self.made.append(place)
        return place

    async def forget(self, snapshot: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is left."""
