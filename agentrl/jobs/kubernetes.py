"""Jobs of Kubernetes, as RayJobs of the KubeRay operator, by kubectl."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import yaml

from agentrl.jobs.config import KubernetesConfig
from agentrl.jobs.job import Job, JobSpec, JobState, Mark
from agentrl.jobs.manifest import MANAGED, MARK, SECTIONS, ray_job, seat
from agentrl.jobs.programs import ProgramError, call, lines_of
from agentrl.types.errors import JobError

_REMEDY = (
    "jobs of Kubernetes are submitted by kubectl: install it and have it reach a cluster with the KubeRay operator "
    "(`kubectl get rayjobs`), or apply by hand what `agentrl submit --dry-run` prints"
)
_KIND = "rayjobs.ray.io"
_STATES = {
    "Initializing": JobState.QUEUED,
    "Waiting": JobState.QUEUED,
    "Retrying": JobState.QUEUED,
    "Suspending": JobState.QUEUED,
    "Suspended": JobState.QUEUED,
    "Running": JobState.RUNNING,
    "Failed": JobState.FAILED,
    "ValidationFailed": JobState.FAILED,
}
"""By what KubeRay says of the job; of one that is Complete its Ray job says more."""
_ENDS = {"SUCCEEDED": JobState.FINISHED, "STOPPED": JobState.STOPPED}


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    """YAML as a person writes it: no references, texts of several lines as they are."""

    def ignore_aliases(self, data: object) -> bool:
        """Values that occur twice are written twice."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


class KubernetesJobs:
    """The RayJobs of a namespace; their numbers are ``NAMESPACE/NAME``."""

    name = "kubernetes"

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self.working_folder = config.folder
        seats = tuple(f"runtime.{section}.resources.{seat(role)}=1" for role, section in SECTIONS.items())
        self.overrides = ("runtime.kind=ray", "runtime.address=auto", *seats)

    def render(self, spec: JobSpec) -> str:
        """The manifest, as `kubectl create -f -` takes it."""
        return self._manifest(spec, 1)

    def submit(self, spec: JobSpec) -> str:
        """Under a name with a number, which Kubernetes gives once: of two submissions at once it refuses one."""
        known = [job.number for job in self.jobs() if job.mark.run_folder == spec.run_folder]
        number = 1 + max((int(name.rpartition("-")[2]) for name in known), default=0)
        self._kubectl("create", "-f", "-", text=self._manifest(spec, number))
        return f"{self._config.namespace}/{spec.mark.job_name(number)}"

    def jobs(self) -> list[Job]:
        """Those with our label."""
        label = ",".join(f"{key}={value}" for key, value in MANAGED.items())
        found = json.loads(self._kubectl("get", _KIND, "-n", self._config.namespace, "-l", label, "-o", "json"))
        read = filter(None, map(_read, found["items"]))
        return sorted(read, key=lambda job: job.submitted_s or 0.0)

    def find(self, number: str) -> Job:
        """By namespace and name. Raises JobError."""
        job = _read(self._get(number))
        if job is None:
            raise JobError(
                f"RayJob {number} was not submitted by agentrl, which leaves it alone: it has no annotation {MARK}"
            )
        return job

    def logs(self, number: str, follow: bool) -> Iterator[str]:
        """What the submitter's pod has seen of the run's output."""
        namespace, name = _split(number)
        last = ["--follow"] if follow else []
        yield from lines_of(["kubectl", "logs", "-n", namespace, "-l", f"job-name={name}", "--tail=-1", *last], _REMEDY)

    def stop(self, number: str) -> None:
        """Have Ray stop the run on the head's pod, which waits for it to park; what does not run yet is deleted."""
        namespace, name = _split(number)
        status = self._get(number).get("status", {})
        if status.get("jobDeploymentStatus") != "Running":
            self._kubectl("delete", _KIND, "-n", namespace, name, "--wait=false")
            return
        head = f"ray.io/cluster={status.get('rayClusterName')},ray.io/node-type=head"
        pod = self._kubectl("get", "pods", "-n", namespace, "-l", head, "-o", "name").strip()
        if not pod:
            raise JobError(f"RayJob {number} has no head at this moment, so it cannot be told to park; try again")
        self._kubectl("exec", "-n", namespace, pod, "--", "ray", "job", "stop", "--no-wait", name)

    def _manifest(self, spec: JobSpec, number: int) -> str:
        return str(yaml.dump_all(ray_job(spec, self._config, number), Dumper=_Plain, sort_keys=False, width=120))

    def _get(self, number: str) -> Mapping[str, Any]:
        namespace, name = _split(number)
        try:
            return dict(json.loads(self._kubectl("get", _KIND, "-n", namespace, name, "-o", "json")))
        except ProgramError as error:
            if "(NotFound)" not in error.said:
                raise
            raise JobError(
                f"there is no RayJob {name} in the namespace {namespace}; `agentrl jobs list --on kubernetes` has ours"
            ) from None

    @staticmethod
    def _kubectl(*arguments: str, text: str | None = None) -> str:
        try:
            return call(["kubectl", *arguments], _REMEDY, text)
        except ProgramError as error:
            if "(NotFound)" in error.said or "(AlreadyExists)" in error.said:
                raise
            raise JobError(f"{error}; {_REMEDY}") from error


def _split(number: str) -> tuple[str, str]:
    namespace, _, name = number.partition("/")
    if not namespace or not name:
        raise JobError(f"'{number}' is no RayJob's: give NAMESPACE/NAME, as `agentrl jobs list --on kubernetes` does")
    return namespace, name


def _read(found: Mapping[str, Any]) -> Job | None:
    """A job of ours; None of others'."""
    metadata, status = found["metadata"], found.get("status", {})
    mark = Mark.read(metadata.get("annotations", {}).get(MARK, ""))
    if mark is None:
        return None
    return Job(
        system=KubernetesJobs.name,
        number=f"{metadata['namespace']}/{metadata['name']}",
        mark=mark,
        state=_state(metadata, status),
        submitted_s=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
        message=status.get("message", "") or status.get("reason", ""),
    )


def _state(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> JobState:
    if "deletionTimestamp" in metadata:
        return JobState.STOPPING
    deployment = status.get("jobDeploymentStatus") or "Initializing"
    if deployment == "Complete":
        return _ENDS.get(status.get("jobStatus", ""), JobState.FAILED)
    return _STATES.get(deployment, JobState.QUEUED)
