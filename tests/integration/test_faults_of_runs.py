from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.long


def failed_run(folder: Path, model: Path, *overrides: str) -> tuple[str, dict]:
    """What a run that must fail says, and its state."""
    result = runs.agentrl(*runs.train_arguments(folder, model, *overrides))
    assert result.returncode == 1, result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr, runs.state(folder / "runs" / "test-seed0")


def test_an_unknown_key_is_refused_with_the_nearest_name(tiny_model: Path, tmp_path: Path) -> None:
    result = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, "bufer.group_size=4", "buffer.max_stalenes=1"))
    assert result.returncode == 1
    assert "did you mean 'buffer'?" in result.stderr
    assert "did you mean 'max_staleness'?" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_missing_model_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    result = runs.agentrl(*runs.train_arguments(tmp_path, tmp_path / "nowhere"))
    assert result.returncode == 1
    assert f"no model at {tmp_path / 'nowhere'}" in result.stderr
    assert "agentrl warmstart" in result.stderr


def test_an_interpreter_of_environments_that_is_not_there_is_named_before_anything_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    python = tmp_path / "nowhere" / "python"
    apart = ('environment.placement="process"', f"environment.interpreter={python}")
    result = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, *apart))
    assert result.returncode == 1
    (error,) = result.stderr.splitlines()
    assert error == f"error: environment.interpreter: no Python at {python}; give the path of one that has agentrl"
    assert not (tmp_path / "runs").exists()


def test_an_engine_that_is_not_there_is_named_with_its_address(tiny_model: Path, tmp_path: Path) -> None:
    engine = '{kind = "attached", urls = ["http://127.0.0.1:9"], start_s = 1.0}'
    message, state = failed_run(tmp_path, tiny_model, f"policies.main.engine={engine}")
    assert "engine main-0 at http://127.0.0.1:9 has not answered" in message
    assert state["status"] == "failed"


def test_a_run_goes_on_when_its_only_engine_dies(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 3, process)
    first = runs.engine_of(run)
    runs.wait_for_requests(run)
    os.kill(first, signal.SIGKILL)
    step = runs.metrics(run)[-1]["step"]
    runs.wait_for_step(run, step + 8, process)
    assert runs.engine_of(run) != first
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == runs.STOPPED, output
    ledger = runs.rows(run / "ledger.jsonl")
    assert sum(line["regenerated_tokens"] for line in ledger) > 0, "what it had in hand was drawn again elsewhere"
    failed = {line["reason"] for line in ledger if line["outcome"] == "dropped"}
    assert failed == set(), "its episodes went on from their tokens, those in flight at the end are parked"


def test_an_engine_that_may_not_be_started_again_stops_the_run_which_can_be_resumed(
    tiny_model: Path, tmp_path: Path
) -> None:
    process = runs.start(
        tmp_path, tiny_model, runs.ENDLESS, 'policies.main.engine={kind = "embedded", max_restarts = 0}'
    )
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 3, process)
    os.kill(runs.engine_of(run), signal.SIGKILL)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 1
    assert "no engine is left" in output
    assert "engine engine-main-0 ended (signal 9)" in output
    assert "Resume the run" in output
    assert runs.state(run)["status"] == "failed"
    assert (run / "checkpoints").is_dir()
    runs.end_at(run, runs.last_step(run) + 2)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr


def test_faults_of_environments_are_counted_failed_episodes_and_never_stop_the_loop(
    tiny_model: Path, tmp_path: Path
) -> None:
    overrides = (
        'environment.options={faults = ["raise", "nan", "text", "hang", "crash"], every = 2}',
        'environment.placement="process"',
        "rollout.max_attempts=1",
        "rollout.limits.tool_s=5.0",  # longer than a busy machine may let a process of an environment wait
    )
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, *overrides)
    run = tmp_path / "runs" / "test-seed0"
    expected = {"environment_step", "environment_reward", "timeout_environment.step", "environment_crashed"}
    runs.wait_until(lambda: expected <= {line["reason"] for line in runs.rows(run / "ledger.jsonl")}, process)
    runs.wait_for_step(run, max(4, runs.last_step(run) + 1), process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == runs.STOPPED, output
    dropped = [line for line in runs.rows(run / "ledger.jsonl") if line["outcome"] == "dropped"]
    failed = {line["reason"] for line in dropped} - {"run_ended", "group_failed"}
    assert failed == expected
    assert all(line["reward"] is None for line in dropped if line["reason"] in failed)
    assert max(row["rollout/failed_fraction"] for row in runs.metrics(run)) > 0
    messages = (run / "episodes" / "failed.jsonl").read_text()
    assert "the database is gone" in messages
    assert "not a finite number" in messages


def test_a_run_whose_episodes_only_fail_stops_and_names_the_last_failure(tiny_model: Path, tmp_path: Path) -> None:
    options = 'environment.options={faults = ["raise"]}'
    message, state = failed_run(tmp_path, tiny_model, options, "rollout.max_consecutive_failures=10")
    assert "10 episodes failed in a row" in message
    assert "the database is gone" in message
    assert state["status"] == "failed"
    assert "10 episodes failed in a row" in state["message"]


def test_prompts_that_fill_the_context_stop_the_run(tiny_model: Path, tmp_path: Path) -> None:
    message, _ = failed_run(tmp_path, tiny_model, "rollout.limits.max_context_tokens=4")
    assert "max_context_tokens = 4" in message


def test_a_full_disk_stops_the_run_with_the_file_and_the_remedy(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, "checkpoint.interval_steps=1")
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 2, process)
    with runs.halted(run):
        (run / "checkpoints").rename(run / "moved")
        (run / "checkpoints").symlink_to("/dev/full")
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 1
    assert "free space, then resume the run" in output
    assert "Traceback" not in output
    (run / "checkpoints").unlink()
    (run / "moved").rename(run / "checkpoints")
    assert runs.state(run)["status"] == "failed"
    assert runs.agentrl("runs", run.parent).returncode == 0
