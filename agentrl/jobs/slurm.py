"""Jobs of Slurm, by sbatch, squeue, scancel and scontrol. What the job itself does is in `scripts/slurm_run.sh`.

A job's mark is its comment, with a word behind it once it was asked to stop. Slurm forgets a job some minutes behind
its end (MinJobAge); what it wrote stays beside the run's folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import NoReturn

from agentrl.jobs.config import SlurmConfig
from agentrl.jobs.job import Job, JobSpec, JobState, Mark
from agentrl.jobs.programs import ProgramError, call
from agentrl.jobs.slurm_script import cpus_of, log_of, script_of
from agentrl.process.stopping import STOPPED
from agentrl.types.errors import JobError

_ASKED = " stopping"
_FIELDS = ("JobID", "State", "exit_code", "SubmitTime", "Reason", "NodeList", "Comment")
_LOOK_S = 1.0
_RUNNING = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_CUT_SHORT = {"CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED"}
_REMEDY = "call agentrl on a machine that Slurm jobs are submitted from, such as the login node"
# What Slurm's commands say, in lower case, and what to do then.
_KNOWN = {
    "invalid partition": "set job.slurm.partition to one that `sinfo` lists",
    "node configuration is not available": (
        "no node of the partition has so many CPUs or GPUs: `sinfo --Node --long` shows what they have; set "
        "job.slurm.cpus or job.slurm.gpus"
    ),
    "time limit": "lower job.slurm.time_limit_minutes: `sinfo` shows the limit of each partition",
    "invalid account": "give one of yours by job.slurm.arguments = ['--account=NAME']",
    "configuration source": f"this machine is of no Slurm cluster: {_REMEDY}, or set SLURM_CONF to its slurm.conf",
    "process configuration file": "SLURM_CONF names no file that Slurm can read: give it the cluster's slurm.conf",
    "unable to contact slurm controller": "slurmctld does not answer; try again when `scontrol ping` says it is up",
    "socket timed out": "slurmctld does not answer in time: `scontrol ping` says when it does; try again then",
    "access/permission denied": "the job is of another user, who may stop it",
}


class SlurmJobs:
    """The jobs of the cluster that this machine's Slurm commands reach."""

    name = "slurm"
    working_folder = None
    overrides = ()

    def __init__(self, config: SlurmConfig) -> None:
        self._config = config

    def render(self, spec: JobSpec) -> str:
        """The script that sbatch gets. Raises ConfigError."""
        return script_of(spec, self._config)

    def submit(self, spec: JobSpec) -> str:
        """Submit it; of two at the same moment the second is withdrawn. Raises JobError, ConfigError."""
        script = self.render(spec)
        self._check_room(cpus_of(spec, self._config))
        spec.run_folder.parent.mkdir(parents=True, exist_ok=True)
        number = _call("sbatch", "--parsable", text=script).strip().partition(";")[0]
        for other in self.jobs():
            is_rival = other.mark.run_folder == spec.run_folder and not other.state.is_over
            if is_rival and int(other.number) < int(number):
                _call("scancel", number)
                raise JobError(
                    f"{spec.run_folder} has got a job at this very moment, {other.id}: `agentrl jobs list` shows it"
                )
        return number

    def jobs(self) -> list[Job]:
        """Those of this user that Slurm has not forgotten, the oldest first. Raises JobError."""
        found = _rows("--me", "--states=all", "--sort=i")
        return [job for row in found if (job := _job(row)) is not None]

    def find(self, number: str) -> Job:
        """One of them. Raises JobError."""
        if not number.isdigit():
            raise JobError(
                f"'{number}' is no number of a Slurm job: give one as `agentrl jobs list` does, such as slurm:42"
            )
        rows: list[list[str]] = []
        with suppress(_UnknownJobError):
            rows = _rows(f"--jobs={number}", "--states=all")
        if not rows:
            raise JobError(
                f"Slurm knows no job {number}: it forgets jobs some minutes behind their end, and what they wrote "
                f"stays beside the run's folder, as RUN.slurm-{number}.log; `agentrl jobs list` shows those it knows"
            )
        job = _job(rows[0])
        if job is None:
            raise JobError(
                f"job {number} of Slurm was not submitted by agentrl, so it is left alone: `scancel {number}` ends it, "
                "if it is yours"
            )
        return job

    def logs(self, number: str, follow: bool) -> Iterator[str]:
        """What the job has written so far. Waits, with `follow`, for: its end. Raises JobError."""
        job = self.find(number)
        path, position = log_of(job.mark.run_folder, number), 0
        while True:
            # Looked at before what it wrote is read: nothing comes behind the end.
            is_over = job.state.is_over
            if path.is_file():
                with path.open(errors="replace") as file:
                    file.seek(position)
                    yield from file
                    position = file.tell()
            if is_over or not follow:
                return
            time.sleep(_LOOK_S)
            job = self.find(number)

    def stop(self, number: str) -> None:
        """Ask it to stop; one that waits is taken out of the queue. Raises JobError."""
        job = self.find(number)
        if job.state is JobState.STOPPING:
            return
        if job.state is JobState.QUEUED:
            _call("scancel", number)
            return
        comment = f"Comment={job.mark.text()}{_ASKED}"
        _call("scontrol", "update", f"JobId={number}", comment, "Requeue=0")
        _call("scancel", "--batch", "--signal=USR2", number)

    def _check_room(self, cpus: int) -> None:
        """Raises JobError if no node has so many CPUs: many a Slurm would let such a job wait for ever."""
        name = self._config.partition
        within = [f"--partition={name}"] if name else []
        most = max(map(int, _call("sinfo", "--noheader", "--Node", "--Format=CPUs", *within).split()), default=None)
        if most is not None and most < cpus:
            where = f"none of partition {name}" if name else "none"
            raise JobError(
                f"the job asks for {cpus} CPUs of one node, and {where} has more than {most}: `sinfo --Node --long` "
                "shows what they have; set job.slurm.cpus"
            )


class _UnknownJobError(JobError):
    """Slurm has no job of this number."""


def _call(*argv: str, text: str | None = None) -> str:
    try:
        return call(argv, _REMEDY, text)
    except ProgramError as error:
        _explain(argv[0], error)


def _explain(program: str, error: ProgramError) -> NoReturn:
    said = error.said.lower()
    if "invalid job id" in said:
        raise _UnknownJobError(f"{program}: {error.said}") from error
    for words, remedy in _KNOWN.items():
        if words in said:
            raise JobError(f"{error}: {remedy}") from error
    raise JobError(f"{error}: mend what it names, in [job.slurm] or on the cluster") from error


def _rows(*selection: str) -> list[list[str]]:
    """Fields of jobs, as squeue has them; the comment is the last, since it may hold anything."""
    fields = ",".join(f"{name}:|" for name in _FIELDS)
    lines = _call("squeue", "--noheader", f"--Format={fields}", *selection).splitlines()
    return [line.rstrip().removesuffix("|").split("|", len(_FIELDS) - 1) for line in lines if line.strip()]


def _job(row: list[str]) -> Job | None:
    """A job of ours; None if it is none."""
    number, state, exit_code, submitted, reason, nodes, comment = row
    mark, is_asked = Mark.read(comment.removesuffix(_ASKED)), comment.endswith(_ASKED)
    if mark is None:
        return None
    submitted_s = None
    with suppress(ValueError):
        submitted_s = datetime.fromisoformat(submitted).timestamp()
    message = f"on {nodes}" if nodes else ""
    if reason not in ("", "None"):
        message = f"{state.lower()}: {reason} {message}".strip()
    return Job("slurm", number, mark, _state(state, exit_code, is_asked), submitted_s, message)


def _state(state: str, exit_code: str, is_asked: bool) -> JobState:
    if state in _QUEUED:
        return JobState.QUEUED
    if state in _RUNNING:
        return JobState.STOPPING if is_asked else JobState.RUNNING
    if state == "COMPLETED":
        return JobState.FINISHED
    is_parked = exit_code.partition(":")[0] in (str(STOPPED), str(STOPPED << 8))
    return JobState.STOPPED if is_parked or is_asked or state in _CUT_SHORT else JobState.FAILED
