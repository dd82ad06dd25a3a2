"""Runs whose disk takes nothing more, refused by the kernel itself: a limit on file sizes needs no rights to set."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.long


def test_a_run_whose_disk_takes_nothing_more_ends_with_one_line_that_names_the_file_and_the_remedy(
    tiny_model: Path, tmp_path: Path
) -> None:
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, "checkpoint.interval_steps=100000")
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 1, process)
    # Of the run's own process alone: journal, ledger, metrics and TensorBoard's file are its own.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 1, output
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert str(run) in errors[0]
    assert "cannot be written" in errors[0]
    assert "free space" in errors[0]
    assert output.splitlines()[-1] == errors[0], "nothing comes behind it"
