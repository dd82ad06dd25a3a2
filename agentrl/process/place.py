"""Where child processes are started: a machine, or a share of one, and who hands them out.

A run on one machine has `agentrl.process.local_place`. Whoever starts a process, speaks with it and ends it needs no
more than is said here, so that the process may as well be on another machine.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from agentrl.types.errors import AgentRLError


class PlaceLostError(AgentRLError):
    """A place is gone, with all that ran there: its machine ended, or cannot be reached. The message names it."""


class PlacesLostError(AgentRLError):
    """Whatever hands out places is gone, and all of them with it; the run ends, to be started again once it is back."""


class Role(StrEnum):
    """What processes are for, by which a place is chosen for them."""

    ENGINE = "engine"
    TRAINER = "trainer"
    WORKER = "worker"
    EVALUATOR = "evaluator"
    SCORER = "scorer"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class ProcessLaunch:
    """What a child process is started with; travels by `agentrl.codec`.

    The command is ``python *argv [MARK] [SOCKET]``: numbers of descriptors, of a running mark if it `has_mark` and of a
    socket if it `has_socket`. `argv` begins with `CHILD` or with a module that calls `die_with_parent`.
    """

    name: str
    argv: tuple[str, ...]
    """What is behind the interpreter."""
    log: str | None = None
    """Absolute path of the file that takes its output, which place and run both see; None: where its starter writes."""
    environment: dict[str, str] = field(default_factory=dict)
    """What it has beside, and instead of, what the place's own environment has."""
    python: str | None = None
    """Interpreter; None is the one that agentrl has at the place."""
    has_socket: bool = True
    has_mark: bool = False


class PlacedProcess(Protocol):
    """A child process that somebody can talk to and kill, wherever it runs."""

    @property
    def pid(self) -> int:
        """Process id, at its place."""

    @property
    def connection(self) -> socket.socket:
        """Our end of its socket, if it has one: a socket of this machine, which whoever asks for it has to close.

        It reads as ended once the process, or its place, is gone.
        """

    @property
    def returncode(self) -> int | None:
        """Exit code, or the signal that ended it below 0; None while it runs, as far as this process knows."""

    async def wait(self) -> int:
        """Waits for: the end of the process. Unblocked by: it, or the loss of its place, which reads as -9.

        Gives `returncode`, which is known from then on. May be asked for by several at once, and be cancelled.
        """

    def signal(self, number: int) -> None:
        """Send it a signal, and nothing that it started; nothing happens once it has ended."""

    def kill(self) -> None:
        """End it and its whole group, at once, as far as the place can be reached; safe to call twice.

        A process of this machine has ended when this returns, unless a disk holds it.
        """

    async def end(self) -> None:
        """Kill it, without holding up the event loop; safe to call twice.

        Waits for: the end of it and of what it started. Unblocked by: that, the loss of the place, a deadline of
        seconds, behind which a disk still holds the process, or nobody can say.
        """

    async def running(self) -> str | None:
        """What its running mark names: what runs, or ran as it ended; None for nothing.

        Read when the process stands still or has ended, before or behind `kill`.
        """

    def how_it_ended(self) -> str:
        """Of a process that has ended: ``exit code 3``, ``signal 9``, ``its node 10.77.0.3 is gone``."""


class Place(Protocol):
    """A machine, or a share of one, on which children are started."""

    @property
    def host(self) -> str:
        """Address at which others reach what listens there; loopback's for a run on one machine."""

    @property
    def node(self) -> str:
        """Names the machine: places that have it in common have the same files and processes."""

    async def start(self, launch: ProcessLaunch) -> PlacedProcess:
        """Start a child, which leads a process group of its own and ends with whoever started it.

        Raises:
            OSError: there is no process, descriptor or log to be had, as of `subprocess.Popen`.
            PlaceLostError: the place is gone.
        """

    async def free_port(self) -> int:
        """A port of `host` that nobody listens on now. Raises PlaceLostError."""

    async def close(self) -> None:
        """Give the place back, where whoever took it has ended what it started; safe to call twice."""


class Places(Protocol):
    """Hands out places to the members of a role."""

    @property
    def host(self) -> str:
        """Address at which places reach what listens on this process's machine; loopback's if they are all there."""

    @property
    def is_elastic(self) -> bool:
        """Whether a run begins with one member of each team, and the others come as there is room."""

    async def take(self, role: Role, name: str, team: str = "") -> Place:
        """A place for one process, whose name is for messages; whoever takes it closes it.

        Members of a `team` are on different machines as far as there is room. If places are elastic, they do for each
        other as well: while one has a place the others wait for theirs.

        Waits for: room. Unblocked by: it, or a deadline.

        Raises:
            PlaceLostError: there was no room in time; says what was asked for and what is there.
        """

    async def gang(self, role: Role, names: Sequence[str]) -> list[Place]:
        """A place for each of several processes that work together: all of them, or none.

        Processes that share a machine's devices have one place object in common. Waits and raises as `take` does.
        """

    async def beside(self, place: Place, name: str) -> Place:
        """A place on the same machine as another one, which takes nothing of what it has and outlives that place.

        Raises:
            PlaceLostError: the machine is gone.
        """

    async def watch(self) -> None:
        """Waits for: the loss of what hands out places, with all of them. Raises PlacesLostError."""

    async def close(self) -> None:
        """Give back what was not; safe to call twice."""
