"""An environment with a sandbox and nothing else, for programs of scaffolds; workers import it by name."""

from __future__ import annotations

import zlib

from agentrl.config.base import ConfigModel
from agentrl.envs.authoring import Rows, tool
from agentrl.envs.sandboxed import SandboxEnvironment, define_sandboxed
from agentrl.sandbox.backend import BackendDefinition
from agentrl.sandbox.local import LocalBackend, LocalOptions, start
from agentrl.types.sandbox import ISOLATED, Command, SandboxSpec

NAME = "tests.integration.program_environment:definition"


class DeskOptions(ConfigModel):
    """What its sandbox is."""

    is_isolated: bool = True
    """Whether it asks for isolation, which `local` does not give."""
    is_coin: bool = False
    """Whether it rewards what the program prints by its checksum: something to train on, and nothing to learn."""


class Desk(SandboxEnvironment[DeskOptions]):
    """A desk at which a program works."""

    def spec(self) -> SandboxSpec:
        return SandboxSpec(needs=ISOLATED if self.options.is_isolated else frozenset())

    def prompt(self) -> str:
        return "work"

    @tool
    async def shell(self, script: str) -> str:
        """Run a script."""
        return (await self.execute(Command(("sh", "-c", script)))).text

    def reward(self) -> float:
        return zlib.crc32((self.answer or "").encode()) % 101 / 100 if self.options.is_coin else 1.0


definition = define_sandboxed("desk", Desk, Rows([{"n": 1}, {"n": 2}]), options=DeskOptions)


async def _start_unreachable(options: LocalOptions, label: str) -> LocalBackend:
    backend = await start(options, label)
    backend.guarantees = frozenset()
    return backend


unreachable = BackendDefinition("unreachable", "sandboxes without a gateway", LocalOptions, _start_unreachable)
