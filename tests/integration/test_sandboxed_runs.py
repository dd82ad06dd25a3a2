"""Runs that train on environments whose commands run in sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import runs

TERMINAL = Path(__file__).parents[2] / "environments" / "terminal"
ONE_KIND = 'environment.options={kinds = ["delete"], isolated = false}'
# A policy that knows one kind of task and has bad habits: half a minute.
LESSONS = (
    'lessons=[{expert = "clumsy", transcripts = 128, max_steps = 60}]',
    *("check_episodes=8", "decay_steps=30", "episodes_per_step=16"),
    *("model.shape.hidden_size=64", "model.shape.feed_forward_size=128"),
)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_policy_trains_on_shell_tasks_in_bubblewrap_and_its_first_step_passes_the_gate(tmp_path: Path) -> None:
    model = tmp_path / "model"
    made = runs.agentrl("warmstart", TERMINAL / "warmstart.toml", f"output={model}", ONE_KIND, *LESSONS)
    assert made.returncode == 0, made.stdout + made.stderr
    result = runs.agentrl(
        *("train", TERMINAL / "terminal.toml", f"policies.main.model={model}", "steps=3", "name=terminal"),
        *(f"runs_folder={tmp_path / 'runs'}", 'environment.options={kinds = ["delete"]}', "buffer.groups_per_step=2"),
        *("evaluation.interval_steps=0", "evaluation.final_tasks=0", "rollout.concurrency=8"),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "terminal-seed0"
    runs.assert_trained(run, 3 * 2 * 8)
    # The keeper tells its counts every second, so those of the last step's end need not be there.
    opened, commands = (
        max(row.get(f"sandbox/{name}_total", 0.0) for row in runs.metrics(run)) for name in ("opened", "commands")
    )
    assert opened > 8
    assert commands > 8
    assert runs.processes_are_gone(run, within_s=60.0)
