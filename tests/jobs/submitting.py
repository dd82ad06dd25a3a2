"""Calls `agentrl submit` and `agentrl jobs` as a person does, and waits for what becomes of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.integration import runs

DEADLINE_S = 240.0


@dataclass(frozen=True)
class Submitter:
    """Submits the tiny recipe to a system, each time with the same overrides."""

    system: str
    folder: Path
    overrides: tuple[str, ...]

    @classmethod
    def make(cls, system: str, folder: Path, model: Path, *overrides: str) -> Submitter:
        folder.mkdir()
        (folder / "recipe.toml").write_text(runs.RECIPE)
        command = f'job.command=["{sys.executable}", "-m", "agentrl.cli.main"]'
        given = (f"policies.main.model={model}", f"runs_folder={folder / 'runs'}", command, *overrides)
        return cls(system, folder, given)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "test-seed0"

    def call(self, *more: str):
        """`agentrl submit`, to its end."""
        return runs.agentrl("submit", self.folder / "recipe.toml", *self.overrides, "--to", self.system, *more)

    def submit(self) -> str:
        """Id of the job that is made."""
        done = self.call()
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[0]

    def states(self) -> dict[str, str]:
        """State of each job of this run, as `agentrl jobs list` has it."""
        done = runs.agentrl("jobs", "list", "--on", self.system)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if str(self.run) in line.split()]
        return {words[0]: words[1] for words in lines}

    def wait_for_state(self, job: str, state: str) -> None:
        wait_until(lambda: self.states()[job] == state, lambda: logs(job))

    def wait_for_step(self, job: str, step: int) -> None:
        wait_until(lambda: any(row["step"] >= step for row in runs.metrics(self.run)), lambda: logs(job))


def logs(job: str) -> str:
    """All that a job has written."""
    done = runs.agentrl("jobs", "logs", job)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_until(is_so: Callable[[], bool], told: Callable[[], str]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until, told()
        time.sleep(0.1)
