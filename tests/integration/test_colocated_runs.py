from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.long

STEPS = 5


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_a_run_whose_engines_make_room_for_its_trainer_loses_no_token(
    tiny_model: Path, tmp_path: Path, mode: str
) -> None:
    overrides = (
        f"steps={STEPS}",
        "runtime.colocated=true",
        "policies.main.engine.kind=embedded",
        "policies.main.engine.count=2",
        f'policies.main.publish.pause_mode="{mode}"',
    )
    result = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, *overrides))
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "test-seed0"
    runs.assert_whole(run)
    runs.assert_archived_as_in_ledger(run)
    runs.assert_trained(run, STEPS * 8)
    steps = [row for row in runs.metrics(run) if "time/train_step_s" in row]
    assert len(steps) == STEPS
    for row in steps:
        # Both engines stood still for all of the step that the trainer itself has timed.
        assert row["colocated/paused_s"] >= 2 * row["time/train_step_s"]
        assert row["colocated/failed_engines"] == 0.0
    assert steps[-1]["engines/healthy"] == 2.0
    assert steps[-1]["engines/distrusted_total"] == 0.0


def test_a_run_outlives_an_engine_that_stands_still_for_ever_while_it_is_to_make_room(
    tiny_model: Path, tmp_path: Path
) -> None:
    overrides = ("steps=30", "runtime.colocated=true", "policies.main.engine.kind=embedded",
                 "policies.main.engine.count=2", "policies.main.client.control_s=3.0")  # fmt: skip
    log = tmp_path / "output"
    with log.open("w") as output:
        process = runs.start(tmp_path, tiny_model, *overrides, output=output)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 1, process)
    os.kill(runs.engine_of(run), signal.SIGSTOP)
    assert process.wait(600) == 0, log.read_text()
    runs.assert_whole(run)
    runs.assert_trained(run, 30 * 8)
    steps = [row for row in runs.metrics(run) if "time/train_step_s" in row]
    assert any(row["engines/healthy"] < 2.0 or row["engines/restarts_total"] for row in steps), "nobody noticed"


def test_engines_that_keep_their_requests_are_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    overrides = ("runtime.colocated=true", 'policies.main.publish.pause_mode="in_place"')
    result = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, *overrides))
    assert result.returncode == 1
    assert "policies.main.publish.pause_mode" in result.stderr
    assert not (tmp_path / "runs").exists()
