"""Jobs of a Ray cluster, by the job server of its head: it starts the run on the head, the run its members on nodes.

Ray stops a job by SIGTERM, and kills it after RAY_JOB_STOP_WAIT_TIME_S, which the job itself sets: to its grace. The
shell that Ray starts is replaced by the run, or it would die of that signal first, and the job would count as stopped
while the run still parks. Ray starts no job once more: after the loss of the head the same submission goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from agentrl.jobs.config import DASHBOARD, RayJobConfig
from agentrl.jobs.job import Job, JobSpec, JobState, Mark
from agentrl.process.stopping import STOPPED
from agentrl.types.errors import JobError

T = TypeVar("T")
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_MARK = "agentrl"
_REACH_S = 10.0
_STATES = {
    JobStatus.PENDING: JobState.QUEUED,
    JobStatus.RUNNING: JobState.RUNNING,
    JobStatus.STOPPED: JobState.STOPPED,
    JobStatus.SUCCEEDED: JobState.FINISHED,
    JobStatus.FAILED: JobState.FAILED,
}


class _Client(JobSubmissionClient):  # type: ignore[misc]
    """Ray's own client, which sets no deadline to its requests."""

    answer_s = 60.0

    def _do_request(self, method: str, endpoint: str, **settings: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=self.answer_s, **settings)


class RayJobs:
    """The jobs of the cluster whose dashboard is at `address`."""

    name = "ray"
    overrides = ("runtime.kind=ray", "runtime.address=auto")
    working_folder = None

    def __init__(self, config: RayJobConfig) -> None:
        self.address = (config.address or os.environ.get(_ADDRESS) or DASHBOARD).rstrip("/")

    def render(self, spec: JobSpec) -> str:
        """The request as a command of Ray's own."""
        request = self._request(spec, 1)
        lines = ["ray job submit", f"--address {self.address}", f"--submission-id {request['submission_id']}"]
        for option, value in (("metadata", request["metadata"]), ("runtime-env", request["runtime_env"])):
            lines.append(f"--{option}-json {shlex.quote(json.dumps(value))}")
        return " \\\n  ".join([*lines, f"-- sh -c {shlex.quote(request['entrypoint'])}"]) + "\n"

    def submit(self, spec: JobSpec) -> str:
        """Under a name with a number, which Ray gives once: of two submissions at the same moment it refuses one."""
        client = self._client()
        known = [job for job in self.jobs() if job.mark.run_folder == spec.run_folder]
        numbers = [int(job.number.rpartition("-")[2]) for job in known]
        request = self._request(spec, 1 + max(numbers, default=0))
        try:
            return str(self._asked(lambda: client.submit_job(**request)))
        except JobError as error:
            if "already exists" not in str(error):
                raise
            raise JobError(
                f"{spec.run_folder} has got a job at this very moment, {self.name}:{request['submission_id']}: "
                f"`agentrl jobs list --on {self.name}` shows it"
            ) from error

    def jobs(self) -> list[Job]:
        """All that were submitted with a mark since the cluster's head was started."""
        return sorted(filter(None, map(_read, self._details())), key=lambda job: job.submitted_s or 0.0)

    def find(self, number: str) -> Job:
        """By Ray's submission id. Raises JobError."""
        for details in self._details():
            if details.submission_id == number:
                return _read(details) or self._refuse_other(number)
        raise JobError(
            f"the Ray cluster at {self.address} knows no job {number}; `agentrl jobs list --on ray` lists those that "
            "were submitted since its head was started"
        )

    def logs(self, number: str, follow: bool) -> Iterator[str]:
        """What the run wrote on the head, once or piece by piece."""
        client = self._client()
        if not follow:
            yield str(self._asked(lambda: client.get_job_logs(number)))
            return
        with asyncio.Runner() as loop:
            pieces: AsyncIterator[str] = client.tail_job_logs(number)
            while (piece := self._asked(lambda: loop.run(_next(pieces)))) is not None:
                yield piece

    def stop(self, number: str) -> None:
        """Ray returns at once; the job is stopped when the run has parked."""
        client = self._client()
        self._asked(lambda: client.stop_job(number))

    def _request(self, spec: JobSpec, number: int) -> dict[str, Any]:
        return {
            "submission_id": spec.mark.job_name(number),
            "entrypoint": f"cd {shlex.quote(str(spec.working_folder))} && exec {shlex.join(spec.argv)}",
            "metadata": {_MARK: spec.mark.text()},
            "runtime_env": {"env_vars": {**spec.environment, _WAIT: str(spec.grace_s)}},
        }

    def _details(self) -> list[JobDetails]:
        client = self._client()
        return list(self._asked(client.list_jobs))

    def _client(self) -> _Client:
        """A client of a server that answers. Raises JobError."""
        place = urlsplit(self.address)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise JobError(
                f"'{self.address}' is no URL of a Ray dashboard: set job.ray.address, or {_ADDRESS}, to one such as "
                f"{DASHBOARD}"
            )
        try:
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname, port), _REACH_S).close()
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error
        # What fails is told by what the client raises; its notes are for whoever follows Ray itself.
        logging.getLogger("ray").setLevel(logging.ERROR)
        return self._asked(lambda: _Client(self.address))

    def _asked(self, ask: Callable[[], T]) -> T:
        """What Ray's client gives. Raises JobError for its errors, which are OSError of requests, too."""
        try:
            return ask()
        except OSError as error:
            raise self._unreachable(error) from error
        except (RuntimeError, ValueError, RayError) as error:
            raise JobError(f"the Ray job server at {self.address} refuses: {_reason(str(error))}") from error

    def _unreachable(self, error: Exception) -> JobError:
        return JobError(
            f"no Ray job server answers at {self.address} ({_first_line(str(error))}): start the cluster's head by "
            "`ray start --head --dashboard-host=0.0.0.0`, with 'ray[default]' installed, or set job.ray.address, or "
            f"{_ADDRESS}, to the URL of its dashboard"
        )

    def _refuse_other(self, number: str) -> Job:
        raise JobError(
            f"job {number} of the Ray cluster at {self.address} was not submitted by agentrl, which leaves it alone; "
            "Ray's own commands are `ray job logs` and `ray job stop`"
        )


async def _next(pieces: AsyncIterator[str]) -> str | None:
    return await anext(pieces, None)


def _read(details: JobDetails) -> Job | None:
    """A job of ours; None of others'."""
    mark = Mark.read((details.metadata or {}).get(_MARK, ""))
    if mark is None or details.submission_id is None:
        return None
    is_parked = details.driver_exit_code == STOPPED
    state = JobState.STOPPED if is_parked else _STATES[details.status]
    submitted_s = details.start_time / 1000 if details.start_time else None
    message = "the run parked by itself" if is_parked else _first_line(details.message or "")
    return Job(RayJobs.name, details.submission_id, mark, state, submitted_s, message)


def _reason(text: str) -> str:
    """Of an answer with a traceback, as the server gives it, the last line."""
    lines = text.strip(" \n.").splitlines() or [""]
    return lines[-1] if "Traceback" in text else lines[0]


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
