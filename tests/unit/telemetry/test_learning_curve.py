from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from agentrl.telemetry.curve import draw_curve, smoothed


def test_a_step_with_one_episode_counts_as_one_episode() -> None:
    means = [(1, 1.0), (2, 0.0), (4, 0.5)]
    episodes = {1: 99.0, 2: 1.0, 4: 100.0, 3: 0.0}
    assert smoothed(means, episodes) == [(1, 1.0), (2, pytest.approx(0.99)), (4, pytest.approx(0.745))]


def test_only_the_last_five_steps_count() -> None:
    means = [(step, float(step == 1)) for step in range(1, 13)]
    values = dict(smoothed(means, dict.fromkeys(range(1, 13), 8.0)))
    assert (values[5], values[6]) == (pytest.approx(0.2), 0.0)


def test_another_runs_heldout_tasks_are_drawn_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, last in (("own", 0.75), ("other", 0.5)):
        rows = [{"step": 0, "eval/reward_mean": 0.25}, {"step": 10, "eval/reward_mean": last}]
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    figures: list[Figure] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw_curve(tmp_path / "own", tmp_path / "curve.png", "title", beside={"without": tmp_path / "other"})
    (drawn,) = figures[0].axes
    lines = [list(container[0].get_xydata().tolist()) for container in drawn.containers]
    assert lines == [[[0, 0.25], [10, 0.75]], [[0, 0.25], [10, 0.5]]]
    assert "without: held-out" in [text.get_text() for text in figures[0].legends[0].get_texts()]
