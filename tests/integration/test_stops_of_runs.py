"""Runs that are asked to stop, or whose plugins hold them up, whatever state they are in."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

LIMIT_S = 300.0
BAD = ("scaffold.name=tests.storms.bad_scaffolds:Bad", "rollout.workers=0", runs.ENDLESS)
# An engine that never waits for the trainer.
ALWAYS_BUSY = ("rollout.limits.max_reply_tokens=400", "buffer.max_staleness=100")
LONG_DEADLINES = (
    "policies.main.client={control_s = 3000, generate_s = 3000, load_s = 3000}",
    "policies.main.fleet={probe_s = 3000, suspect_s = 3000, dead_s = 3000, wait_s = 3000}",
    "rollout.limits.tool_s=3000",
    "rollout.limits.total_s=6000",
    runs.ENDLESS,
)


def bad(fault: str) -> str:
    return f'scaffold.options={{fault = "{fault}", words = ["count 3"]}}'


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def interrupt_until_it_ends(process: subprocess.Popen[str]) -> str:
    """Ctrl-C again and again."""
    until = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < until
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    return process.communicate()[0]


def test_a_scaffold_that_never_awaits_ends_its_run_with_its_name_and_line(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model, *BAD, bad("hang"), "rollout.worker_silence_s=15")
    output = process.communicate(timeout=LIMIT_S)[0]
    run = tmp_path / "runs" / "test-seed0"
    assert process.returncode == 1, output
    [line] = [line for line in output.splitlines() if line.startswith("error:")]
    source = Path(__file__).parents[1] / "storms" / "bad_scaffolds.py"
    number = 1 + source.read_text().splitlines().index("            time.sleep(3600)")
    assert "has stood still 15 s while scaffold tests.storms.bad_scaffolds:Bad plays episode train-0" in line
    assert f"line {number} of {source}, in misbehave" in line
    assert f"go on with: agentrl resume {run}" in line
    assert runs.state(run)["status"] == "failed"
    assert f"error: {runs.state(run)['message']}" == line
    assert runs.processes_are_gone(run, within_s=LIMIT_S)


def test_a_run_that_a_scaffold_holds_up_still_ends_by_a_second_signal(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model, *BAD, bad("hang"), "rollout.worker_silence_s=3000")
    run = tmp_path / "runs" / "test-seed0"
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "holds up whoever plays it\n":
        assert line, "the run has ended"
    output = interrupt_until_it_ends(process)
    assert process.returncode == runs.STOPPED, output
    assert runs.processes_are_gone(run, within_s=LIMIT_S)


def test_a_scaffold_that_calls_exit_costs_its_episodes_and_the_run_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    result = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, *BAD, bad("sys_exit"), "steps=3"))
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "test-seed0"
    failed = [line for line in runs.rows(run / "ledger.jsonl") if line["outcome"] == "dropped" and line["stop"]]
    reasons = {line["reason"] for line in runs.rows(run / "ledger.jsonl")}
    assert any("scaffold" in str(reason) for reason in reasons), (reasons, failed)


def test_a_run_whose_engine_hangs_stops_without_waiting_for_it(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model, *LONG_DEADLINES, *ALWAYS_BUSY)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 1, process)
    engine = runs.engine_of(run)
    runs.wait_for_requests(run)
    os.kill(engine, signal.SIGSTOP)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=LIMIT_S)[0]
    print(f"stopped within {time.monotonic() - asked:.1f} s")
    assert process.returncode == runs.STOPPED, output
    assert "replies were not given back in time; they go on from what is on record" in output
    assert runs.processes_are_gone(run, within_s=LIMIT_S)


def test_a_run_that_is_killed_while_it_starts_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = tmp_path / "runs" / "test-seed0"
    process = subprocess.Popen(
        runs.command(*runs.train_arguments(tmp_path, tiny_model)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    wait_until(lambda: any("agentrl.trainer.rank" in line_of(pid) for pid in runs.processes_of(run)))
    process.kill()
    process.communicate()
    assert runs.processes_are_gone(run, within_s=LIMIT_S)
    assert list(temporary.iterdir()) == []


def test_a_run_that_is_told_to_stop_while_it_starts_says_how_to_go_on(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model)
    run = tmp_path / "runs" / "test-seed0"
    wait_until(lambda: any("agentrl.trainer.rank" in line_of(pid) for pid in runs.processes_of(run)))
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == runs.STOPPED, output
    assert f"asked to stop; go on with: agentrl resume {run}" in output.replace("\n", "")
    assert runs.processes_are_gone(run, within_s=LIMIT_S)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr


def line_of(pid: int) -> str:
    """A process's command line; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
