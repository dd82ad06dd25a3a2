"""Draws a run's learning curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agentrl.telemetry.sinks import read_json_lines

_WINDOW_STEPS = 5
_AREA_PER_EPISODE = 0.6  # in square points: some hundred episodes to a step make a dot of 9 points across


def draw_curve(metrics: Path, picture: Path, title: str) -> None:
    """Draw reward in training and on held-out tasks over steps and episodes, from a run's metrics, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_json_lines(metrics)
    train = _series(rows, "rollout/reward_mean")
    episodes = dict(_series(rows, "rollout/episodes"))
    heldout = _series(rows, "eval/reward_mean")
    errors = dict(_series(rows, "eval/reward_standard_error"))
    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=120)
    # A line would fall to 0 at every step that sees one failed episode end: dots say of how many each mean is.
    areas = [_AREA_PER_EPISODE * episodes[step] for step, _ in train]
    label = "training episodes of each step, area their number"
    axes.scatter(*_columns(train), areas, color="#b8c4d6", linewidths=0, label=label)
    axes.plot(
        *_columns(smoothed(train, episodes)),
        color="#5b7db1",
        linewidth=2,
        label=f"the same, of {_WINDOW_STEPS} steps together",
    )
    steps, means = _columns(heldout)
    bars = [2 * errors.get(step, 0.0) for step in steps]
    axes.errorbar(
        steps,
        means,
        bars,
        color="#c2532d",
        marker="o",
        linewidth=2,
        capsize=3,
        label="held-out tasks, two standard errors",
    )
    axes.set(xlabel="steps", ylabel="mean reward", title=title, ylim=(-0.02, 1.02))
    axes.grid(alpha=0.25)
    if sizes := [size for _, size in _series(rows, "batch/episodes")]:
        of_step = sum(sizes) / len(sizes)
        scaling = (lambda steps: np.asarray(steps) * of_step, lambda counts: np.asarray(counts) / of_step)
        top = axes.secondary_xaxis("top", functions=scaling)
        top.set_xlabel("episodes trained")
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def sparkline(values: list[float]) -> str:
    """A line of block characters for values from 0 to 1. Example: ``[0, .5, 1]`` gives three bars."""
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[round(min(max(value, 0.0), 1.0) * (len(bars) - 1))] for value in values)


def smoothed(means: list[tuple[int, float]], episodes: dict[int, float]) -> list[tuple[int, float]]:
    """The mean over all episodes of the last steps, at each step, from the means of each step.

    Some steps see a hundred episodes end, some a single one.

    Example: means 1.0 of 3 episodes and then 0.0 of one give 1.0 and 0.75.
    """
    smooth = []
    for index, (step, _) in enumerate(means):
        window = means[max(0, index + 1 - _WINDOW_STEPS) : index + 1]
        total = sum(mean * episodes[step] for step, mean in window)
        smooth.append((step, total / sum(episodes[step] for step, _ in window)))
    return smooth


def _series(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Values by step; of a step that a resumed run took again, the newest."""
    return sorted({row["step"]: row[name] for row in rows if name in row}.items())


def _columns(series: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]
