"""Draws a run's learning curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.telemetry.json_lines import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (("#b8c4d6", "#5b7db1", "#c2532d"), ("#c9dcc4", "#5f9a55", "#7a4fa0"), ("#e0d3b8", "#a58a45", "#1f7a7a"))
_BESIDE = "#555555"
_WINDOW_STEPS = 5
_AREA_PER_EPISODE = 0.6  # in square points: some hundred episodes to a step make a dot of 9 points across


def draw_curve(
    metrics: Path, picture: Path, title: str, policies: Sequence[str] = (), beside: Mapping[str, Path] | None = None
) -> None:
    """Draw reward in training and on held-out tasks over steps and episodes, from a run's metrics, as PNG.

    Of several `policies`, whose metrics begin with their names, each has a colour of its own. `beside` has the metrics
    of other runs by what they are called, of which the held-out tasks are drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_json_lines(metrics)
    figure, axes = plt.subplots(figsize=(7.5, 4.6), dpi=120)
    for number, policy in enumerate(policies or [""]):
        _draw_policy(axes, rows, policy, _COLOURS[number % len(_COLOURS)])
    for label, other in (beside or {}).items():
        _draw_heldout(axes, read_json_lines(other), "", f"{label}: held-out", color=_BESIDE, linestyle="--")
    axes.set(xlabel="steps", ylabel="mean reward", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.25)
    sizes = [size for _, size in series(rows, "batch/episodes")]
    if sizes:
        of_step = sum(sizes) / len(sizes)
        scaling = (lambda steps: np.asarray(steps) * of_step, lambda counts: np.asarray(counts) / of_step)
        axes.secondary_xaxis("top", functions=scaling).set_xlabel("episodes trained")
    figure.suptitle(title)
    # Below the axes, where no point can be.
    figure.legend(loc="outside lower center", ncols=1 if policies else 3, frameon=False, fontsize="small")
    figure.set_layout_engine("constrained")
    figure.savefig(picture)
    plt.close(figure)


def _draw_policy(axes: Axes, rows: Sequence[Mapping[str, Any]], policy: str, colours: tuple[str, str, str]) -> None:
    """Dots for the training episodes of each step, a line for some steps together, one with bars for held-out tasks."""
    prefix, of_whom = (f"{policy}/", f"{policy}: ") if policy else ("", "")
    pale, middle, strong = colours
    train = series(rows, f"{prefix}rollout/reward_mean")
    episodes = dict(series(rows, f"{prefix}rollout/episodes"))
    # A line would fall to 0 at every step that sees one failed episode end: dots say of how many each mean is.
    areas = [_AREA_PER_EPISODE * episodes[step] for step, _ in train]
    label = f"{of_whom}training, area by episodes"
    axes.scatter(*_columns(train), areas, color=pale, linewidths=0, label=label)
    line = _columns(smoothed(train, episodes))
    axes.plot(*line, color=middle, linewidth=2, label=f"{of_whom}{_WINDOW_STEPS} steps together")
    _draw_heldout(axes, rows, prefix, f"{of_whom}held-out, two standard errors", color=strong, linestyle="-")


def _draw_heldout(
    axes: Axes, rows: Sequence[Mapping[str, Any]], prefix: str, label: str, color: str, linestyle: str
) -> None:
    errors = dict(series(rows, f"{prefix}eval/reward_standard_error"))
    steps, means = _columns(series(rows, f"{prefix}eval/reward_mean"))
    bars = [2 * errors.get(step, 0.0) for step in steps]
    axes.errorbar(steps, means, bars, color=color, linestyle=linestyle, marker="o", linewidth=2, capsize=3, label=label)


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


def series(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Values of a metric by step; of a step that a resumed run took again, the newest."""
    return sorted({row["step"]: row[name] for row in rows if name in row}.items())


def _columns(series: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]
