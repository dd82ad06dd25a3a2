"""What is made of kubectl's answers, which a script of that name gives: no cluster takes part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agentrl.jobs.config import JobConfig, KubernetesConfig
from agentrl.jobs.job import JobState, Mark
from agentrl.jobs.kubernetes import KubernetesJobs
from agentrl.jobs.submission import build_job, submit_job
from agentrl.types.errors import JobError

# Answers by the verb, from answers.json; notes how it was called.
_KUBECTL = """#!{python}
import json, sys
from pathlib import Path
here = Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads((here / "answers.json").read_text())
key = max((key for key in answers if " ".join(sys.argv[1:]).startswith(key)), key=len)
out, err, status = answers[key]
if sys.argv[1] == "create":
    (here / "created").write_text(sys.stdin.read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(status)
"""
CONFIG = KubernetesConfig(image="i", claim="c", namespace="ml")
MARK = Mark("t-seed0", Path("/shared/runs/t-seed0"))


class Kubectl:
    """The script, and what it is to answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = folder / "kubectl"
        script.write_text(_KUBECTL.format(python=sys.executable))
        script.chmod(0o755)

    def answer(self, **answers: object) -> None:
        told = {verb: [text if isinstance(text, str) else json.dumps(text), "", 0] for verb, text in answers.items()}
        (self.folder / "answers.json").write_text(json.dumps(told))

    def refuse(self, verb: str, said: str) -> None:
        (self.folder / "answers.json").write_text(json.dumps({verb: ["", said, 1]}))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def kubectl(tmp_path_factory, monkeypatch) -> Kubectl:
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", str(folder))
    return Kubectl(folder)


def ray_job(name: str = "agentrl-t-seed0-1", mark: Mark | None = MARK, **status: str) -> dict:
    annotations = {"agentrl.dev/mark": mark.text()} if mark else {}
    metadata = {"name": name, "namespace": "ml", "creationTimestamp": "2026-11-26T20:00:00Z"}
    return {"metadata": {**metadata, "annotations": annotations}, "status": status}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, JobState.QUEUED),
        ({"jobDeploymentStatus": "Initializing"}, JobState.QUEUED),
        ({"jobDeploymentStatus": "Retrying", "jobStatus": "FAILED"}, JobState.QUEUED),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, JobState.RUNNING),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, JobState.FINISHED),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, JobState.STOPPED),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED"}, JobState.FAILED),
    ],
)
def test_what_kuberay_says_of_a_job_is_its_state(kubectl, status, state):
    kubectl.answer(get={"items": [ray_job(**status), ray_job("other", mark=None)]})
    [job] = KubernetesJobs(CONFIG).jobs()
    assert (job.id, job.state, job.mark) == ("kubernetes:ml/agentrl-t-seed0-1", state, MARK)
    assert job.submitted_s == 1795723200.0


def test_a_job_is_created_under_the_next_number_of_its_run(kubectl, recipe):
    system = KubernetesJobs(CONFIG)
    spec = build_job(recipe, [], JobConfig(), system)
    name = spec.mark.job_name(4)
    over = ray_job(spec.mark.job_name(3), jobDeploymentStatus="Complete", jobStatus="STOPPED")
    kubectl.answer(**{"get": {"items": [over]}, "create": "", f"get rayjobs.ray.io -n ml {name}": ray_job(name)})
    assert submit_job(system, spec).number == f"ml/{name}"
    assert f"name: {name}" in (kubectl.folder / "created").read_text()


def test_a_job_that_is_not_there_or_not_ours_is_named(kubectl):
    system = KubernetesJobs(CONFIG)
    kubectl.refuse("get", 'Error from server (NotFound): rayjobs.ray.io "x" not found')
    with pytest.raises(JobError, match="there is no RayJob x in the namespace ml"):
        system.find("ml/x")
    kubectl.answer(get=ray_job("x", mark=None))
    with pytest.raises(JobError, match="was not submitted by agentrl"):
        system.find("ml/x")
    with pytest.raises(JobError, match="give NAMESPACE/NAME"):
        system.find("x")


def test_a_cluster_that_does_not_answer_is_an_error_with_what_to_do(kubectl):
    kubectl.refuse("get", "The connection to the server 10.0.0.1:6443 was refused")
    with pytest.raises(JobError, match=r"10\.0\.0\.1:6443 was refused; jobs of Kubernetes are submitted by kubectl"):
        KubernetesJobs(CONFIG).jobs()


def test_without_kubectl_the_error_says_what_to_do_instead(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match=r"no program kubectl on this machine: .*--dry-run"):
        KubernetesJobs(CONFIG).jobs()


def test_a_job_that_runs_is_stopped_by_ray_and_one_that_waits_is_deleted(kubectl):
    system = KubernetesJobs(CONFIG)
    running = ray_job(jobDeploymentStatus="Running", rayClusterName="c7")
    kubectl.answer(**{"get rayjobs": running, "get pods": "pod/c7-head\n", "exec": ""})
    system.stop("ml/agentrl-t-seed0-1")
    assert kubectl.calls()[-1] == [*"exec -n ml pod/c7-head -- ray job stop --no-wait agentrl-t-seed0-1".split()]
    kubectl.answer(get=ray_job(), delete="")
    system.stop("ml/agentrl-t-seed0-1")
    assert kubectl.calls()[-1][0] == "delete"


def test_logs_come_as_the_submitter_writes_them(kubectl):
    kubectl.answer(logs="one\ntwo\n")
    assert list(KubernetesJobs(CONFIG).logs("ml/x", follow=True)) == ["one\n", "two\n"]
    assert "--follow" in kubectl.calls()[-1]
