"""Runs as jobs of a real Ray job server, on a head that starts its members, too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient

from agentrl.jobs.config import JobConfig, RayJobConfig
from agentrl.jobs.ray_jobs import RayJobs
from agentrl.jobs.submission import build_job
from agentrl.testing.virtual_cluster import NodeShape, VirtualCluster
from agentrl.types.errors import JobError
from tests.integration import runs
from tests.jobs.submitting import Submitter, logs, wait_until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster() -> Iterator[VirtualCluster]:
    with VirtualCluster.start(0, head=NodeShape(cpus=6), has_dashboard=True) as cluster:
        client = JobSubmissionClient(cluster.dashboard)
        wait_until(lambda: takes_jobs(client), lambda: "the job server does not take jobs")
        yield cluster


def takes_jobs(client: JobSubmissionClient) -> bool:
    """The dashboard answers some seconds before the agent of its node is there, which starts jobs."""
    try:
        client.submit_job(entrypoint="true")
    except RuntimeError:
        return False
    return True


@pytest.fixture
def submitter(cluster, job_folder, job_model, request, monkeypatch) -> Submitter:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", cluster.dashboard)
    return Submitter.make("ray", job_folder / f"ray-{request.node.name[:40]}", job_model, "steps=24", "job.grace_s=60")


def process_of(run: Path) -> int:
    """The run itself among the processes that name its folder."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in runs.processes_of(run.parent)}
    return next(pid for pid, words in lines.items() if "train" in words and words[-2] == "--resume")


def test_a_job_parks_when_it_is_stopped_or_pre_empted_and_goes_on_when_it_is_submitted_again(submitter):
    first = submitter.submit()
    follower = subprocess.Popen(runs.command("jobs", "logs", first, "--follow"), stdout=subprocess.PIPE, text=True)
    again = submitter.call()
    assert again.returncode == 1
    assert f"has a job already, {first}" in again.stderr
    assert f"agentrl jobs stop {first}" in again.stderr
    assert again.stdout == ""
    submitter.wait_for_step(first, 2)
    stopped = runs.agentrl("jobs", "stop", first)
    assert stopped.returncode == 0, stopped.stderr
    submitter.wait_for_state(first, "stopped")
    assert runs.state(submitter.run)["status"] == "stopped", logs(first)
    saved = runs.version(submitter.run)["step"]
    assert (submitter.run / "checkpoints" / "main" / f"{saved:06d}" / "progress.json").is_file()
    followed, _ = follower.communicate(timeout=60)
    assert "stopped before its last step" in followed
    over = runs.agentrl("jobs", "stop", first)
    assert (over.returncode, "is over" in over.stderr) == (1, True)

    second = submitter.submit()
    submitter.wait_for_step(second, saved + 2)
    os.kill(process_of(submitter.run), signal.SIGTERM)
    submitter.wait_for_state(second, "stopped")
    assert runs.state(submitter.run)["status"] == "stopped", logs(second)

    third = submitter.submit()
    submitter.wait_for_state(third, "finished")
    assert submitter.states() == {first: "stopped", second: "stopped", third: "finished"}
    runs.assert_whole(submitter.run)
    runs.assert_archived_as_in_ledger(submitter.run)
    runs.assert_trained(submitter.run, 24 * 8)
    last = submitter.call()
    assert (last.returncode, "has finished at version" in last.stderr) == (1, True)


def test_a_run_that_fails_is_a_job_that_failed(submitter):
    """A node role that asks for what no node has."""
    job = submitter.call("runtime.engines.gpus=1")
    assert job.returncode == 0, job.stderr
    name = job.stdout.split()[0]
    submitter.wait_for_state(name, "failed")
    assert "no node of the cluster has what a member of runtime role 'engine' asks for" in logs(name)


def test_jobs_of_others_are_neither_listed_nor_touched(cluster):
    other = JobSubmissionClient(cluster.dashboard).submit_job(entrypoint="sleep 600")
    system = RayJobs(RayJobConfig(address=cluster.dashboard))
    assert other not in [job.number for job in system.jobs()]
    with pytest.raises(JobError, match=f"{other} .* was not submitted by agentrl"):
        system.find(other)
    with pytest.raises(JobError, match="knows no job raysubmit_nowhere"):
        system.find("raysubmit_nowhere")
    client = JobSubmissionClient(cluster.dashboard)
    client.stop_job(other)
    wait_until(lambda: client.get_job_status(other).is_terminal(), lambda: other)


def test_of_two_submissions_at_the_same_moment_one_is_refused(cluster, submitter):
    """Both have seen that there is no job yet: Ray gives the name of the first job once."""
    system = RayJobs(RayJobConfig(address=cluster.dashboard))
    client = JobSubmissionClient(cluster.dashboard)
    spec = build_job(submitter.folder / "recipe.toml", submitter.overrides, JobConfig(), system)
    client.submit_job(entrypoint="true", submission_id=spec.mark.job_name(1))
    with pytest.raises(JobError, match=f"has got a job at this very moment, ray:{spec.mark.job_name(1)}"):
        system.submit(spec)
