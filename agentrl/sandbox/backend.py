"""What a backend of sandboxes gives; effect log, files, deadlines and output caps are the keeper's and not its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from agentrl.config.base import ConfigModel
from agentrl.types.sandbox import Command, Guarantee, SandboxSpec

Options = TypeVar("Options", bound=ConfigModel)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended by itself; `is_out_of_memory` if the kernel killed a process of it for memory.

    Example: ``Exit(137, is_out_of_memory=True)``.
    """

    code: int
    is_out_of_memory: bool = False


class Output(Protocol):
    """Takes what a command writes, as it writes it."""

    async def stdout(self, data: bytes) -> None:
        """The next bytes of stdout; waits until there is room for more."""

    async def stderr(self, data: bytes) -> None:
        """The next bytes of stderr; waits until there is room for more."""


class Place(Protocol):
    """One sandbox of a backend, with a workspace that lasts from command to command."""

    async def run(self, command: Command, stdin: AsyncIterator[bytes], output: Output) -> Exit:
        """Run a command to its end, then end what it left running. `stdin` is used in place of the command's own.

        A command whose program is not there ends with 127 and says so on stderr, as in a shell. When cancelled, it
        kills all that the command started before it returns; where only the whole sandbox can be ended for that, its
        later calls raise EpisodeError (boundary sandbox, kind lost).

        Raises:
            EpisodeError: boundary sandbox: the sandbox is gone, or its backend does not answer.
        """

    async def snapshot(self, name: str) -> None:
        """Keep the files as they are now under a name. Only while no command runs."""

    async def close(self) -> None:
        """End all that runs in it and remove all that it was; safe to call twice."""


class Backend(Protocol):
    """Makes sandboxes of one kind."""

    guarantees: frozenset[Guarantee]
    """What it really enforces, as probed when it started."""
    missing: Mapping[Guarantee, str]
    """Why the others are not enforced, for a person."""

    async def create(self, spec: SandboxSpec, snapshot: str | None = None) -> Place:
        """A sandbox of its own, empty or with the files of a snapshot; the workspace belongs to who runs commands.

        Raises:
            EpisodeError: boundary sandbox: there is no such image (kind image), or the backend does not answer.
        """

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot; one that is gone already is no error."""

    async def close(self) -> None:
        """Remove all sandboxes and snapshots of this keeper; safe to call twice."""


@dataclass(frozen=True, slots=True)
class BackendDefinition(Generic[Options]):
    """A kind of sandboxes, to be registered as entry point ``agentrl.sandboxes``.

    `start(options, label)` probes what can be enforced, removes what keepers left that are gone, and gives the backend;
    what it makes bears the label. It raises ConfigError if there can be no such sandbox here, and says what to do.
    """

    name: str
    description: str
    options: type[Options]
    start: Callable[[Options, str], Awaitable[Backend]]
