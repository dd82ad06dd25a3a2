"""A run that trains on an environment whose commands run in containers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docker.playing import IMAGE
from tests.integration import runs

RECIPES = Path(__file__).parents[2] / "environments" / "code_repair"
# A policy that writes a right line more often than not: half a minute.
LESSONS = (
    'lessons=[{expert = "expert", transcripts = 128, max_steps = 32}]',
    *("check_episodes=8", "decay_steps=16"),
)


@pytest.mark.timeout(900)
def test_a_policy_trains_on_code_repair_in_containers_and_its_first_step_passes_the_gate(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    # Sandboxes of kind local take the first python3 of the path; this one is no script around another.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    made = runs.agentrl("warmstart", RECIPES / "warmstart.toml", f"output={model}", *LESSONS)
    assert made.returncode == 0, made.stdout + made.stderr
    result = runs.agentrl(
        *("train", RECIPES / "code_repair.toml", f"policies.main.model={model}", f"runs_folder={tmp_path / 'runs'}"),
        *("steps=3", "buffer.groups_per_step=2", "rollout.concurrency=8", "sandbox.warm=4"),
        f"sandbox.options={{hosts = ['{url}'], image = '{IMAGE}'}}",
        *("evaluation.interval_steps=0", "evaluation.final_tasks=0"),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "code_repair-seed0"
    runs.assert_trained(run, 3 * 2 * 8)
