"""Scripts of Slurm jobs, and what batch scripts do with the signals of a job, without a Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.jobs.config import SlurmConfig
from agentrl.jobs.job import JobSpec, Members
from agentrl.jobs.slurm import SlurmJobs
from agentrl.process.place import Role
from agentrl.types.errors import ConfigError, JobError

EXAMPLE = Path("deploy/slurm/example.sbatch")
SPEC = JobSpec(
    run="sql-seed0",
    run_folder=Path("/shared/runs/sql-seed0"),
    recipe=Path("/shared/sql.toml"),
    argv=("/shared/agentrl/bin/agentrl", "train", "/shared/sql.toml", "--resume"),
    working_folder=Path("/shared"),
    environment={"HF_HUB_OFFLINE": "1"},
    members=(Members(Role.ENGINE, 1, 1, cpus=4, gpus=1), Members(Role.TRAINER, 1, 1, cpus=4, gpus=1)),
    grace_s=300,
)
CONFIG = SlurmConfig(partition="gpu", time_limit_minutes=1440, arguments=("--account=physics",))
# Says which signals reach it; parks, as a run does, at the first SIGTERM, for which it takes until it may end.
RUN = """
import signal, sys, time
from pathlib import Path
def park(number, frame):
    with open("told", "a") as told: told.write("TERM ")
    while not Path("may_end").exists(): time.sleep(0.01)
    sys.exit(130)
signal.signal(signal.SIGTERM, park)
Path("up").touch()
time.sleep(60)
"""


def test_the_example_is_what_a_dry_run_prints():
    assert SlurmJobs(CONFIG).render(SPEC) == EXAMPLE.read_text()


def test_a_recipe_may_say_otherwise_what_a_job_takes():
    given = SlurmJobs(SlurmConfig(cpus=64, gpus=8)).render(SPEC)
    assert "#SBATCH --cpus-per-task=64\n" in given
    assert "#SBATCH --gpus-per-node=8\n" in given


def test_what_could_never_run_is_refused():
    with pytest.raises(ConfigError, match="time_limit_minutes 5 leaves no time before the run parks"):
        SlurmJobs(SlurmConfig(time_limit_minutes=5)).render(SPEC)
    with pytest.raises(ValidationError, match="what agentrl sets itself"):
        SlurmConfig(arguments=("--comment=mine",))
    with pytest.raises(ValidationError, match="no option of sbatch"):
        SlurmConfig(arguments=("account=physics",))


def test_a_machine_without_slurm_is_told_where_to_go(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match=r"there is no program squeue on this machine: .* such as the login node"):
        SlurmJobs(SlurmConfig()).jobs()


def start(folder: Path, may_end: bool = True, grace_s: int = 60, config: SlurmConfig = CONFIG) -> subprocess.Popen[str]:
    """The script of a job, with a run that waits for a signal, and a scontrol that says what it is asked."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in {"scontrol": 'echo "scontrol $@"', "srun": "sleep 60"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    if may_end:
        (folder / "may_end").touch()
    argv = (sys.executable, "-c", RUN)
    spec = replace(SPEC, argv=argv, working_folder=folder, grace_s=grace_s)
    job = subprocess.Popen(
        ["bash", "-c", SlurmJobs(config).render(spec)],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell cannot trap what it was started to ignore, as below nohup; Slurm starts none so.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    wait_for(folder / "up", job)
    return job


def wait_for(file: Path, job: subprocess.Popen[str]) -> None:
    while not file.exists():
        assert job.poll() is None
        time.sleep(0.01)


AGAIN = "scontrol requeue 7"


@pytest.mark.parametrize(
    ("told", "is_queued_again"),
    [
        pytest.param([signal.SIGUSR1], True, id="time limit"),
        pytest.param([signal.SIGHUP], True, id="pre-emption"),
        pytest.param([signal.SIGUSR2], False, id="person"),
        pytest.param([signal.SIGUSR1, signal.SIGUSR2], False, id="time limit and person"),
        pytest.param([signal.SIGUSR1, signal.SIGHUP], True, id="time limit and pre-emption"),
    ],
)
def test_a_run_is_told_once_to_park_and_the_job_is_queued_again_unless_a_person_stopped_it(
    tmp_path, told, is_queued_again
):
    job = start(tmp_path, may_end=False)
    for number in told:
        job.send_signal(number)
        wait_for(tmp_path / "told", job)  # a shell handles signals of different numbers in no certain order
    (tmp_path / "may_end").touch()
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 130
    assert (tmp_path / "told").read_text() == "TERM "
    assert (AGAIN in output) == is_queued_again


def test_a_signal_to_all_processes_is_not_told_twice(tmp_path):
    job = start(tmp_path, may_end=False)
    os.killpg(job.pid, signal.SIGTERM)
    wait_for(tmp_path / "told", job)
    (tmp_path / "may_end").touch()
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 130
    assert (tmp_path / "told").read_text() == "TERM "
    assert AGAIN not in output, "Slurm itself has decided what becomes of the job"


def test_a_run_that_does_not_park_is_killed_after_its_grace(tmp_path):
    job = start(tmp_path, may_end=False, grace_s=1)
    job.send_signal(signal.SIGUSR2)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 128 + signal.SIGKILL
    assert AGAIN not in output


def test_a_job_that_may_not_queue_again_ends_parked(tmp_path):
    job = start(tmp_path, config=SlurmConfig(requeue=False))
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert (job.returncode, AGAIN in output) == (130, False)
