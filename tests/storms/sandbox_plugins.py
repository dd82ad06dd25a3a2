"""The SQL environment with every call in a sandbox that counts it: what happened twice shows in its files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from agentrl.envs.authoring import tool
from agentrl.envs.sandboxed import SandboxEnvironment, define_sandboxed, read_file
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command, CommandResult, SandboxSpec
from agentrl.types.task import Split, Task
from agentrl_environments.sql.environment import SqlEnvironment
from agentrl_environments.sql.tasks import SqlOptions, sample_task

COUNTS = "/workspace/counts"
LINGER_S = 0.2001
"""Seconds between the count and the call's end: kills hit calls that have happened and are not on record."""
_MOST_BYTES = 1 << 20


class CountingOptions(SqlOptions):
    """Where counts go at the end."""

    count_file: Path
    """One line for each call that a sandbox has counted: its effect id, the sandbox, the tool."""
    linger_s: float = LINGER_S


class CountingSandbox(SandboxEnvironment[CountingOptions], SqlEnvironment):
    """Questions over a database whose calls are counted in a sandbox."""

    def spec(self) -> SandboxSpec:
        """A small one."""
        return SandboxSpec(processes=32, disk_bytes=1 << 20)

    @tool
    async def schema(self) -> str:
        """List the tables and their columns."""
        await self._count()
        return str(super().schema())

    @tool
    async def query(self, sql: str) -> str:
        """Run one SELECT and return its rows."""
        await self._count()
        return str(super().query(sql))

    def save(self) -> list[int]:
        """What the verdict depends on."""
        return [self._num_queries, self._num_errors]

    def load(self, state: list[int]) -> None:
        """Take it."""
        self._num_queries, self._num_errors = state

    async def close(self) -> None:
        """Tell what the sandbox has counted, and end it."""
        if "sandbox" in self.__dict__:
            handle = self.sandbox.handle()
            try:
                counted = await read_file(self.sandbox, COUNTS, _MOST_BYTES)
            except EpisodeError:  # nothing was called, or another worker has gone on in it
                counted = b""
            for effect_id in counted.decode().split():
                self._note(self.options.count_file, f"{effect_id} {handle} called")
        await super().close()

    async def _count(self) -> None:
        script = f"echo {self.call_id} >> {COUNTS}; sleep {self.options.linger_s}"
        await self.execute(Command(("sh", "-c", script)))

    @staticmethod
    def _note(file: Path, line: str) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


class ForgetfulSandbox(CountingSandbox):
    """Questions over a database whose calls run again when a worker goes on, since their commands have new ids."""

    async def execute(self, command: Command) -> CommandResult:
        """Run a command under an id that no one has seen."""
        return await self.sandbox.run(command, secrets.token_hex(8))


class _SqlTasks:
    """The tasks of the SQL environment under another name."""

    num_tasks = None

    def task(self, name: str, split: Split, ordinal: int, seed: int) -> Task:
        """The SQL task with the default options."""
        made = sample_task(SqlOptions(), split, ordinal, seed)
        return Task(name, made.split, made.ordinal, made.payload)


counting = define_sandboxed("counting_sandbox", CountingSandbox, _SqlTasks(), options=CountingOptions)
forgetful = define_sandboxed("forgetful_sandbox", ForgetfulSandbox, _SqlTasks(), options=CountingOptions)
