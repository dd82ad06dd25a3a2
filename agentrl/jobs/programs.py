"""Calls programs of job systems (sbatch, kubectl), with a deadline and an error that names the remedy."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence

from agentrl.types.errors import JobError

_DEADLINE_S = 60.0


class ProgramError(JobError):
    """A program ended with another status than 0. `said` is what it wrote on standard error, or else on output."""

    def __init__(self, program: str, status: int, said: str) -> None:
        super().__init__(f"{program} failed with status {status}: {said or 'it says nothing'}")
        self.said = said


def call(argv: Sequence[str], remedy: str, text: str | None = None, deadline_s: float = _DEADLINE_S) -> str:
    """What a program writes on its output. `text` is its input; `remedy` says what to do if there is no such program.

    Waits for: its end. Unblocked by: it, a deadline.

    Raises:
        ProgramError: it failed.
        JobError: it is not there, or does not answer in time.
    """
    program = _found(argv[0], remedy)
    given = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    try:
        ended = subprocess.run(
            [program, *argv[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
            **given,
        )
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{argv[0]} has not answered for {deadline_s:g} s: {remedy}") from error
    if ended.returncode != 0:
        raise ProgramError(argv[0], ended.returncode, (ended.stderr.strip() or ended.stdout.strip()))
    return ended.stdout


def lines_of(argv: Sequence[str], remedy: str) -> Iterator[str]:
    """What a program writes, output and errors, as it comes, until it ends; it is ended with the iterator.

    Raises:
        ProgramError: it failed.
        JobError: it is not there, or does not end behind its output.
    """
    program = _found(argv[0], remedy)
    process = subprocess.Popen(
        [program, *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            yield line
        if process.wait(_DEADLINE_S) != 0:
            raise ProgramError(argv[0], process.returncode, last)
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{argv[0]} has closed its output, and did not end within {_DEADLINE_S:g} s") from error
    finally:
        process.kill()
        process.wait()


def _found(program: str, remedy: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise JobError(f"there is no program {program} on this machine: {remedy}")
    return path
