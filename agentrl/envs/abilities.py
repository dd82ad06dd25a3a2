"""Environments with all calls of the protocol, whichever of them their authors have written."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.protocols import AttachableEnvironment, Environment, ProgramEnvironment, SnapshotEnvironment
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.message import Message
from agentrl.types.sandbox import Command, CommandResult


def attachable(environment: Environment) -> AttachableEnvironment:
    """The environment as one that has a session. Raises TypeError if it has none, whatever its definition declares."""
    if not isinstance(environment, AttachableEnvironment):
        raise TypeError(f"{type(environment).__name__} lacks handle, detach or outcome")
    return environment


def snapshotting(environment: Environment) -> SnapshotEnvironment:
    """The environment as one that gives its state away. Raises TypeError if it does not, whatever is declared."""
    if not isinstance(environment, SnapshotEnvironment):
        raise TypeError(f"{type(environment).__name__} lacks snapshot")
    return environment


def running_programs(environment: Environment) -> ProgramEnvironment:
    """The environment as one that runs programs. Raises EpisodeError (boundary environment, kind no_sandbox)."""
    if not isinstance(environment, ProgramEnvironment):
        raise no_sandbox(f"{type(environment).__name__} has none")
    return environment


def no_sandbox(why: str) -> EpisodeError:
    """The failure of an episode whose scaffold runs a program where there is no sandbox for it."""
    return EpisodeError(
        Boundary.ENVIRONMENT,
        "no_sandbox",
        f"a scaffold's program runs in the sandbox of its environment, and {why}; play it in an environment that is a "
        "SandboxEnvironment (agentrl.envs.sandboxed), placed inline, in a process or in a venv",
    )


class WholeEnvironment:
    """An environment of this process as a `DurableEnvironment`; what it cannot do raises TypeError.

    Without a sandbox for programs it raises EpisodeError, since that is a scaffold's wish and not a declaration's.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def start(self) -> Opening:
        """The environment's opening."""
        return await self._environment.start()

    async def step(self, action: Message) -> StepResult:
        """The environment's reaction."""
        return await self._environment.step(action)

    async def score(self) -> Score:
        """The environment's verdict."""
        return await self._environment.score()

    async def close(self) -> None:
        """Free the environment."""
        await self._environment.close()

    async def handle(self) -> str | None:
        """Names the live session."""
        return await attachable(self._environment).handle()

    async def detach(self) -> None:
        """Leave the session alive."""
        await attachable(self._environment).detach()

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """The result of a step that was dispatched to the session."""
        return await attachable(self._environment).outcome(step, effect_ids)

    async def snapshot(self) -> bytes:
        """The whole state."""
        return await snapshotting(self._environment).snapshot()

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """What a scaffold's program gives."""
        return await running_programs(self._environment).run(command, effect_id)

    async def stop(self, effect_id: str) -> None:
        """End such a program."""
        await running_programs(self._environment).stop(effect_id)
