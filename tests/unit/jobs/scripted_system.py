"""A job system in memory, which says what it was asked to submit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl.jobs.job import Job, JobSpec, JobState
from agentrl.types.errors import JobError


class ScriptedSystem:
    """Jobs get the numbers 1, 2, 3; what becomes of them the test sets."""

    name = "scripted"

    def __init__(self, overrides: tuple[str, ...] = (), working_folder: Path | None = None) -> None:
        self.overrides, self.working_folder = overrides, working_folder
        self.submitted: list[JobSpec] = []
        self.states: list[JobState] = []

    def render(self, spec: JobSpec) -> str:
        return " ".join(spec.argv)

    def submit(self, spec: JobSpec) -> str:
        self.submitted.append(spec)
        self.states.append(JobState.QUEUED)
        return str(len(self.submitted))

    def jobs(self) -> list[Job]:
        pairs = zip(self.submitted, self.states, strict=True)
        return [Job(self.name, str(i), spec.mark, state) for i, (spec, state) in enumerate(pairs, 1)]

    def find(self, number: str) -> Job:
        for job in self.jobs():
            if job.number == number:
                return job
        raise JobError(f"no job {number}")

    def logs(self, number: str, follow: bool) -> Iterator[str]:
        yield ""

    def stop(self, number: str) -> None:
        self.states[int(number) - 1] = JobState.STOPPED
