"""Runs as jobs of a real Slurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.jobs.config import JobConfig, SlurmConfig
from agentrl.jobs.slurm import SlurmJobs
from agentrl.jobs.submission import build_job
from agentrl.testing.slurm_cluster import HIGH, LOW, SlurmCluster
from agentrl.types.errors import JobError
from tests.integration import runs
from tests.jobs.submitting import Submitter, logs, wait_until

_IDLES = ("--output=/dev/null", "--wrap=sleep 600")
_TAKES_ALL = ("sbatch", "--parsable", f"--partition={HIGH}", "--nodes=2", "--exclusive", *_IDLES)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def slurm(job_folder: Path) -> Iterator[SlurmCluster]:
    """Two nodes of eight CPUs; jobs that are pre-empted hear of it by their steps."""
    with SlurmCluster.start(2, cpus=8, shared=[job_folder]) as cluster:
        yield cluster


@pytest.fixture
def submitter(slurm, job_folder, job_model, request) -> Submitter:
    return made(request, job_folder, job_model)


def made(request, job_folder: Path, job_model: Path, *overrides: str) -> Submitter:
    given = ("steps=12", "job.grace_s=60", f"job.slurm.partition={LOW}", *overrides)
    return Submitter.make("slurm", job_folder / f"slurm-{request.node.name[:40]}", job_model, *given)


def restarts(cluster: SlurmCluster, job: str) -> int:
    """How often Slurm has queued a job again."""
    number = job.partition(":")[2]
    return int(cluster.asked("squeue", "--noheader", "--states=all", f"--jobs={number}", "--Format=RestartCnt"))


def test_a_pre_empted_job_parks_is_queued_again_and_goes_on_to_its_end(slurm, submitter):
    job = submitter.submit()
    again = submitter.call()
    assert again.returncode == 1
    assert f"has a job already, {job}" in again.stderr
    follower = subprocess.Popen(runs.command("jobs", "logs", job, "--follow"), stdout=subprocess.PIPE, text=True)
    submitter.wait_for_step(job, 2)
    assert submitter.states() == {job: "running"}
    # Both nodes, so that the run has nowhere to go until this one ends.
    over = slurm.asked(*_TAKES_ALL)
    wait_until(lambda: restarts(slurm, job) == 1, lambda: logs(job))
    submitter.wait_for_state(job, "queued")
    assert runs.state(submitter.run)["status"] == "stopped", logs(job)
    saved = runs.version(submitter.run)["step"]
    assert saved < 12
    assert (submitter.run / "checkpoints" / "main" / f"{saved:06d}" / "progress.json").is_file()
    slurm.asked("scancel", over)
    submitter.wait_for_state(job, "finished")
    followed, _ = follower.communicate(timeout=60)
    assert "is queued again: the run is parked" in followed
    assert followed == logs(job)
    assert restarts(slurm, job) == 1
    runs.assert_whole(submitter.run)
    runs.assert_archived_as_in_ledger(submitter.run)
    runs.assert_trained(submitter.run, 12 * 8)


def test_a_job_is_stopped_in_the_queue_and_while_it_runs_and_is_not_queued_again(slurm, submitter):
    over = slurm.asked(*_TAKES_ALL)
    waiting = submitter.submit()
    assert submitter.states() == {waiting: "queued"}
    everywhere = runs.agentrl("jobs", "list")
    assert (everywhere.returncode, waiting in everywhere.stdout) == (0, True)
    assert "kubernetes does not answer" in everywhere.stdout
    assert logs(waiting) == ""
    assert runs.agentrl("jobs", "stop", waiting).returncode == 0
    assert submitter.states() == {waiting: "stopped"}
    slurm.asked("scancel", over)

    job = submitter.submit()
    submitter.wait_for_step(job, 2)
    assert runs.agentrl("jobs", "stop", job).returncode == 0
    assert submitter.states()[job] in ("stopping", "stopped")
    submitter.wait_for_state(job, "stopped")
    assert runs.state(submitter.run)["status"] == "stopped", logs(job)
    assert "stopped before its last step" in logs(job)
    assert restarts(slurm, job) == 0
    ended = runs.agentrl("jobs", "stop", job)
    assert (ended.returncode, "is over" in ended.stderr) == (1, True)


def test_jobs_of_others_and_jobs_that_are_not_there_are_named(slurm, submitter):
    other = slurm.asked("sbatch", "--parsable", f"--partition={LOW}", *_IDLES)
    system = SlurmJobs(SlurmConfig())
    assert other not in [job.number for job in system.jobs()]
    with pytest.raises(JobError, match=f"job {other} of Slurm was not submitted by agentrl"):
        system.find(other)
    with pytest.raises(JobError, match="Slurm knows no job 99999: it forgets jobs"):
        system.find("99999")
    with pytest.raises(JobError, match="'run' is no number of a Slurm job"):
        system.find("run")
    slurm.asked("scancel", other)


def test_a_partition_that_is_not_there_is_named_with_the_remedy(slurm, submitter):
    nowhere = submitter.call("job.slurm.partition=nowhere")
    assert nowhere.returncode == 1
    assert "invalid partition specified: nowhere" in nowhere.stderr
    assert "set job.slurm.partition to one that `sinfo` lists" in nowhere.stderr
    assert submitter.states() == {}


def test_more_than_any_node_has_is_refused_with_the_remedy(slurm, submitter):
    large = submitter.call("job.slurm.cpus=64")
    assert large.returncode == 1
    assert f"asks for 64 CPUs of one node, and none of partition {LOW} has more than 8" in large.stderr
    assert "set job.slurm.cpus" in large.stderr
    assert submitter.states() == {}


def test_of_two_submissions_at_the_same_moment_the_second_is_withdrawn(slurm, submitter):
    """Both have seen that there is no job yet."""
    over = slurm.asked(*_TAKES_ALL)
    system = SlurmJobs(SlurmConfig(partition=LOW))
    spec = build_job(submitter.folder / "recipe.toml", submitter.overrides, JobConfig(), system)
    first = system.submit(spec)
    with pytest.raises(JobError, match=f"has got a job at this very moment, slurm:{first}"):
        system.submit(spec)
    states = submitter.states()
    assert states.pop(f"slurm:{first}") == "queued"
    assert list(states.values()) == ["stopped"]
    system.stop(first)
    slurm.asked("scancel", over)


def test_a_controller_that_cannot_be_reached_is_named(slurm, submitter, tmp_path, monkeypatch):
    known = Path(os.environ["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(known + "SlurmctldPort=9\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(JobError, match="slurmctld does not answer"):
        SlurmJobs(SlurmConfig()).jobs()
    monkeypatch.delenv("SLURM_CONF")
    with pytest.raises(JobError, match="set SLURM_CONF to its"):
        SlurmJobs(SlurmConfig()).jobs()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    nowhere = runs.agentrl("jobs", "list")
    assert nowhere.returncode == 1
    assert all(f"{system}: " in nowhere.stderr for system in ("ray", "slurm", "kubernetes"))
