"""An environment whose tools run commands in a sandbox.

Example, whole::

    class Counting(SandboxEnvironment):
        "Files to be counted in a shell."

        def spec(self) -> SandboxSpec:
            return SandboxSpec(memory_bytes=256 << 20, processes=64)

        async def furnish(self) -> None:
            await write_files(self.sandbox, {name: b"" for name in self.row["names"]})

        def prompt(self) -> str:
            return "How many files are here?"

        @tool
        async def shell(self, command: str) -> str:
            "Run a command."
            return (await self.execute(Command(("sh", "-c", command), timeout_s=10))).text

        def reward(self) -> float:
            return float(self.answer == str(len(self.row["names"])))


    definition = define_sandboxed("counting", Counting, Rows([{"names": ["a", "b"]}, {"names": ["c"]}]))

The sandbox is held by the run's keeper, so it outlives the process in which the environment lives. Whoever goes on in
the episode attaches to it and gets back what the environment keeps beside the sandbox: after each step its state and
the step's result. A step that had ended is answered by that result. One that had not is carried out again, from the
state before it: a command of it that was begun is not begun a second time, since its id is made of the tool call's, and
gives its result as if it had just ended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from agentrl import codec
from agentrl.envs.authoring import Gold, Options, ToolEnvironment, define
from agentrl.envs.definition import EnvironmentDefinition, Expert, NoOptions
from agentrl.envs.rows import TaskSource
from agentrl.envs.tools import ToolMethod
from agentrl.protocols import Sandbox
from agentrl.sandbox.archives import files_of, read_file, write_file, write_files
from agentrl.sandbox.client import KeeperHost
from agentrl.types.environment import Opening, StepResult
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.message import Message
from agentrl.types.sandbox import Command, CommandResult, SandboxSpec
from agentrl.types.task import Task

__all__ = ["SandboxEnvironment", "define_sandboxed", "files_of", "read_file", "write_file", "write_files"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept beside a sandbox: steps and commands so far, the state then, and what the last step gave."""

    num_steps: int
    num_commands: int
    state: bytes
    result: StepResult | None


class SandboxEnvironment(ToolEnvironment[Options]):
    """The base of an environment with a sandbox for its agent; `sandbox` is there from `furnish` on.

    Attributes that change while the episode is played are lost with the process, unless `save` and `load` are written:
    their state is kept beside the sandbox after every step.
    """

    sandbox: Sandbox

    def __init__(self, options: Options, task: Task) -> None:
        self._num_steps = 0
        self._num_commands = 0
        self._result: StepResult | None = None
        super().__init__(options, task)

    @abstractmethod
    def spec(self) -> SandboxSpec:
        """What the task asks of its sandbox."""

    async def furnish(self) -> None:
        """Put into the sandbox what the task needs, before the agent comes."""

    async def execute(self, command: Command) -> CommandResult:
        """Run a command in the agent's sandbox, at most once, whoever carries out the step. Raises EpisodeError."""
        effect_id = f"{self.call_id}/{self._num_commands}"
        self._num_commands += 1
        return await self.sandbox.run(command, effect_id)

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """Run a scaffold's program in the agent's sandbox, at most once under this id. Raises EpisodeError."""
        return await self.sandbox.run(command, effect_id)

    async def stop(self, effect_id: str) -> None:
        """End such a program. Raises EpisodeError."""
        await self.sandbox.stop(effect_id)

    @asynccontextmanager
    async def fresh(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """One more sandbox, where the agent never was; ended with the block. Raises EpisodeError."""
        sandbox = await KeeperHost.of_run().open(spec or self.spec(), beside=self.sandbox.handle())
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def start(self) -> Opening:
        """Open and furnish the sandbox, and pose the task."""
        self.sandbox = await KeeperHost.of_run().open(self.spec())
        await self.furnish()
        await self._keep_state()
        return await super().start()

    async def step(self, action: Message) -> StepResult:
        """Carry out the calls, and keep beside the sandbox where the episode is."""
        self._result = await super().step(action)
        self._num_steps += 1
        await self._keep_state()
        return self._result

    async def handle(self) -> str | None:
        """Names the sandbox, which lives on from now on when this process is gone."""
        return await self.sandbox.keep()

    async def detach(self) -> None:
        """Leave the sandbox alive."""
        await self.sandbox.detach()

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """The result of the last step, if it is that one. None for one that had not ended: it is carried out again."""
        return self._result if step == self._num_steps - 1 else None

    async def close(self) -> None:
        """End the sandbox."""
        await super().close()
        if "sandbox" in self.__dict__:
            await self.sandbox.close()

    async def attach(self, handle: str, token: int) -> None:
        """Go on in a live sandbox. Raises EpisodeError (boundary environment, kind lost) if it is gone."""
        try:
            self.sandbox = await KeeperHost.of_run().attach(handle, token)
            kept = await self.sandbox.recall()
        except EpisodeError as error:
            if error.failure.kind != "lost":
                raise
            raise EpisodeError(Boundary.ENVIRONMENT, "lost", error.failure.message) from error
        if kept is None:
            raise EpisodeError(Boundary.ENVIRONMENT, "lost", f"sandbox {handle} was never furnished")
        last = codec.decode(kept, _Kept)
        self._num_steps, self._num_commands, self._result = last.num_steps, last.num_commands, last.result
        self.restore(last.state)

    def load(self, state: Any) -> None:
        """Take a state that `save` gave; nothing for an environment without one."""

    async def _keep_state(self) -> None:
        has_state = type(self).save is not ToolEnvironment.save
        state = self.packed(self.save() if has_state else None)
        await self.sandbox.remember(codec.encode(_Kept(self._num_steps, self._num_commands, state, self._result)))


def define_sandboxed(
    name: str,
    environment: type[SandboxEnvironment[Options]],
    tasks: TaskSource,
    *,
    options: type[Options] = NoOptions,  # type: ignore[assignment]
    gold: Gold | None = None,
    experts: Mapping[str, Expert[Options]] | None = None,
) -> EnvironmentDefinition[Options]:
    """The definition to be registered, as `define` makes it; its episodes go on in live sandboxes.

    Raises:
        ConfigError: the class has no docstring, a tool's hints cannot become a schema, or a tool is named ``run`` or
            ``stop``, by which scaffolds' programs are run.
    """
    for hidden in ("run", "stop"):
        if isinstance(getattr(environment, hidden), ToolMethod):
            raise ConfigError(
                f"environment '{name}': {environment.__name__} has a tool named {hidden}, which hides the method by "
                "which programs of scaffolds are run; give it another name"
            )

    async def reattached(options: Options, task: Task, handle: str, token: int) -> SandboxEnvironment[Options]:
        instance = environment(options, task)
        await instance.attach(handle, token)
        return instance

    made = define(name, environment, tasks, options=options, gold=gold, experts=experts)
    return replace(made, reattach_fenced=reattached, restore=None, needs_sandbox=True)
