"""What a training run says of its steps."""

from __future__ import annotations

import pytest

from agentrl.cli.progress import RunProgress

STEP = {
    "batch/reward_mean": 0.5,
    "buffer/staleness_mean_steps": 0.0,
    "rollout/aborted_generations": 0.0,
    "time/step_s": 1.0,
    "trainer/optimizer_steps": 1.0,
}


@pytest.mark.parametrize("count", [0.0, 2.0])
def test_masked_sequences_are_told_with_how_far_they_were_off(count, capsys):
    progress = RunProgress()
    progress.on_start("runs/demo", 9, ["main"])
    metrics = {"trainer/mismatched_sequences": count, "trainer/fresh_gap_max_nats": 2.7}
    progress.on_step("main", 3, {**STEP, **metrics})
    progress.on_step("main", 4, STEP)
    told = [line.split() for line in capsys.readouterr().out.splitlines() if "masked" in line]
    assert [line[:5] for line in told] == ([["step", "3", "2", "sequences", "masked:"]] if count else [])
    assert all("2.7" in line for line in told)


def test_steps_without_anything_to_learn_are_told_once_and_counted(capsys):
    progress = RunProgress()
    progress.on_start("runs/demo", 9, ["main"])
    for step, optimizer_steps in enumerate([1.0, 0.0, 1.0, 0.0, 0.0], start=5):
        progress.on_step("main", step, {**STEP, "trainer/optimizer_steps": optimizer_steps})
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in told if "weights stay" in line] == [["step", "6", "nothing", "to", "learn:"]]
    assert "nothing to learn 3 times" in told[-1]


def test_what_is_told_of_several_policies_says_of_which(capsys):
    progress = RunProgress()
    progress.on_start("runs/demo", 9, ["white", "black"])
    for step, policy in enumerate(("white", "black", "black"), start=8):
        progress.on_step(policy, step, {**STEP, "trainer/optimizer_steps": float(policy == "white")})
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in told if "weights" in line] == [["step", "9", "black", "nothing"]]
    assert [line[1] for line in told if "staleness" in line] == ["white", "black"]
