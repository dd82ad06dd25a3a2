"""What a job is, whichever system runs it, and what a system has to be able to do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import NamedTuple, Protocol

from agentrl.process.place import Role

_MARK = "agentrl"
_NAME_CHARACTERS = 24


class JobState(StrEnum):
    """How a job stands, as its system sees it."""

    QUEUED = "queued"
    """It waits for its turn or for machines, or to be started once more after a pre-emption."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was asked to stop and parks; it is killed if that takes longer than its grace."""
    STOPPED = "stopped"
    """It was stopped before the run's last step; the same submission goes on with the run."""
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether the system does nothing more with it."""
        return self in (JobState.STOPPED, JobState.FINISHED, JobState.FAILED)


@dataclass(frozen=True, slots=True)
class Members:
    """Processes of one role, and what each of them takes.

    Example: ``Members(Role.ENGINE, count=4, least=4, cpus=4.0, gpus=1.0)``, which are 16 CPUs and 4 GPUs.
    """

    role: Role
    count: int
    """All that the recipe asks for."""
    least: int
    """Those without which the run does not begin: fewer than `count` where it is elastic."""
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Named resources of Ray's nodes."""


class Mark(NamedTuple):
    """What is written on a job in its system: it is ours, and which run it is of."""

    run: str
    run_folder: Path

    def text(self) -> str:
        """As systems keep it. Example: ``agentrl:sql-demo-seed0:/shared/runs/sql-demo-seed0``."""
        return f"{_MARK}:{self.run}:{self.run_folder}"

    def job_name(self, number: int) -> str:
        """A name for the run's job of this number, of lower-case letters, digits and dashes, 47 of them at most.

        Example: ``agentrl-sql-demo-seed0-3f2a91-1``. The six digits are the run folder's.
        """
        words = re.sub("[^a-z0-9]+", "-", self.run.lower())[:_NAME_CHARACTERS].strip("-")
        digest = hashlib.sha256(str(self.run_folder).encode()).hexdigest()[:6]
        return f"{_MARK}-{words}-{digest}-{number}"

    @classmethod
    def read(cls, text: str) -> Mark | None:
        """The mark in a text; None if it is none of ours."""
        word, _, rest = text.partition(":")
        run, _, folder = rest.partition(":")
        return cls(run, Path(folder)) if word == _MARK and run and folder.startswith("/") else None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is submitted: a command, where it runs, and what it takes. All paths are absolute.

    Example::

        JobSpec(
            run="sql-demo-seed0",
            run_folder=Path("/shared/runs/sql-demo-seed0"),
            recipe=Path("/shared/demo.toml"),
            argv=("agentrl", "train", "/shared/demo.toml", "steps=50", "--resume"),
            working_folder=Path("/shared"),
            environment={},
            members=(Members(Role.ENGINE, 1, 1), Members(Role.TRAINER, 1, 1)),
            grace_s=120,
        )
    """

    run: str
    run_folder: Path
    recipe: Path
    """On this machine; it stands in `argv`."""
    argv: tuple[str, ...]
    """``agentrl train RECIPE [overrides] --resume``. SIGTERM parks it; it ends with status 130 if steps are left
    (`agentrl.process.stopping.STOPPED`), 0 if none are, 1 if it failed."""
    working_folder: Path
    """Where the command starts: relative paths of the recipe are relative to it."""
    environment: Mapping[str, str]
    """What it has beside the environment that the system gives it. Holds no secrets: it is printed and stored."""
    members: tuple[Members, ...]
    """Processes that the run starts, itself not among them."""
    grace_s: int
    """Seconds between a stop or pre-emption and the kill, in which the run parks and checkpoints."""

    @property
    def mark(self) -> Mark:
        """What is written on the job."""
        return Mark(self.run, self.run_folder)

    @property
    def cpus(self) -> int:
        """CPUs of all members together, and one for the run itself."""
        return 1 + ceil(sum(part.count * part.cpus for part in self.members))

    @property
    def gpus(self) -> int:
        """GPUs of all members together."""
        return ceil(sum(part.count * part.gpus for part in self.members))


@dataclass(frozen=True, slots=True)
class Job:
    """A job of ours in some system.

    Example: ``Job("slurm", "42", Mark("sql-demo-seed0", Path("/shared/runs/sql-demo-seed0")), JobState.RUNNING)``.
    """

    system: str
    number: str
    """What the system calls it: ``42``, ``agentrl-sql-demo-seed0-3f2a91-1``."""
    mark: Mark
    state: JobState
    submitted_s: float | None = None
    """Seconds since 1970; None if the system does not say."""
    message: str = ""
    """What the system says of it: why it waits, where it runs, how it ended."""

    @property
    def id(self) -> str:
        """What commands take. Example: ``slurm:42``."""
        return f"{self.system}:{self.number}"


class JobSystem(Protocol):
    """A cluster's own queue of jobs. Calls block for seconds at most, but for `logs` that follow.

    All of them raise JobError, with the remedy, if the system cannot be reached or refuses; `number` is `Job.number`.
    """

    @property
    def name(self) -> str:
        """``ray``, ``slurm`` or ``kubernetes``."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the command gets behind the person's own overrides, so that the recipe fits the system."""

    @property
    def working_folder(self) -> Path | None:
        """Where commands start; None is this process's own working folder.

        With None this machine sees recipe, models and run folder as the job will, so that they are checked here.
        """

    def render(self, spec: JobSpec) -> str:
        """What would be submitted, as a person would write it: a script, a manifest, a request. Asks nobody."""

    def submit(self, spec: JobSpec) -> str:
        """Submit it, with its mark; gives its number.

        That no other job of the run is queued or runs has been looked at before; where the system can hold that against
        another submission at the same moment, it does.
        """

    def jobs(self) -> list[Job]:
        """Those of ours that the system still knows, the oldest first."""

    def find(self, number: str) -> Job:
        """One of them. Raises JobError if there is none of this number, or it is not ours; says which."""

    def logs(self, number: str, follow: bool) -> Iterator[str]:
        """What the job has written so far, in pieces; with `follow` until it ends."""

    def stop(self, number: str) -> None:
        """Ask a queued or running job to stop, and return: it parks and checkpoints within its grace, then ends."""
