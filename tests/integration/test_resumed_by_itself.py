from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.long


def rank_of(run: Path) -> int:
    """The process of a run's trainer."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in runs.processes_of(run)}
    return next(pid for pid, line in lines.items() if "agentrl.trainer.rank" in line)


@pytest.mark.parametrize("process_of", [rank_of, runs.engine_of], ids=["trainer", "only engine"])
def test_a_run_goes_on_by_itself_once_a_process_is_lost_that_it_cannot_do_without(
    tiny_model: Path, tmp_path: Path, process_of
) -> None:
    engine = 'policies.main.engine={kind = "embedded", max_restarts = 0}'
    process = runs.start(tmp_path, tiny_model, "steps=12", engine, 'runtime={kind = "local", max_resumes = 2}')
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 3, process)
    os.kill(process_of(run), signal.SIGKILL)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert "going on from the last checkpoint (1 of 2)" in output.replace("\n", " ")
    assert [row["step"] for row in runs.metrics(run)] == list(range(1, 13))
    runs.assert_whole(run)


def test_an_engine_of_a_resumed_run_is_started_anew_when_newer_checkpoints_are_there(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It begins with the weights that the run went on from, which no other process needs any more."""
    given = "steps=16", "checkpoint.interval_steps=1", "checkpoint.keep=1", "--resume"
    run = tmp_path / "runs" / "test-seed0"
    for step in (3, 8):
        process = runs.start(tmp_path, tiny_model, *given)
        runs.wait_for_step(run, step, process)
        os.kill(process.pid if step == 3 else runs.engine_of(run), signal.SIGKILL)
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    runs.assert_whole(run)


def test_a_job_that_is_called_again_goes_on_with_its_run_and_has_nothing_to_do_in_the_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    process = runs.start(tmp_path, tiny_model, "steps=8", "--resume")
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 3, process)
    process.kill()
    process.communicate()
    again = runs.train_arguments(tmp_path, tiny_model, "steps=8", "--resume")
    second = runs.agentrl(*again)
    assert second.returncode == 0, second.stderr
    runs.assert_whole(run)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["test-seed0"]
    third = runs.agentrl(*again)
    assert third.returncode == 0, third.stderr
    assert "is finished at version 0.8; nothing is left to do" in third.stdout.replace("\n", " ")
    other = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, "steps=9", "--resume"))
    assert other.returncode == 1
    assert "was started with another steps" in other.stderr
