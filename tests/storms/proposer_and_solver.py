"""Runs of a proposer and its solver by their recipes, and what their folders say of both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from agentrl.journal.archive_file import read_consumed
from agentrl.journal.archive_names import archive_files
from agentrl.telemetry.json_lines import read_json_lines
from agentrl.types.episode import Episode

_RECIPES = Path(__file__).parents[2] / "environments" / "proposals"
_POLICIES = ("proposer", "solver")
_WINDOW_STEPS = 5


def make(folder: Path, seed: int, **overrides: str) -> None:
    """Warm-start the policies that are not in the folder yet, each with one more override of its recipe if given."""
    for policy in _POLICIES:
        if not (folder / policy).exists():
            more = [overrides[policy]] if policy in overrides else []
            _call("warmstart", _RECIPES / f"{policy}.toml", f"output={folder / policy}", f"seed={seed}", *more)


def train(folder: Path, seed: int, overrides: Sequence[str]) -> Path:
    """Train the policies of a folder together; the run's folder."""
    models = [f"policies.{policy}.model={folder / policy}" for policy in _POLICIES]
    _call("train", _RECIPES / "proposals.toml", *models, f"runs_folder={folder / 'runs'}", f"seed={seed}", *overrides)
    return folder / "runs" / f"proposals-seed{seed}"


def learning(run: Path) -> dict[str, Any]:
    """What became of both policies."""
    rows = read_json_lines(run / "metrics.jsonl")
    solver, proposer = (_series(rows, f"{policy}/eval/reward_mean") for policy in ("solver", "proposer"))
    return {
        "solver_before": solver[0],
        "solver_after": solver[-1],
        "in_band_before": proposer[0],
        "in_band_after": proposer[-1],
        "in_band_of_valid": _in_band_of_valid(run),
        "solver_curve": solver,
        "in_band_curve": proposer,
        "steps": {policy: len(_series(rows, f"{policy}/batch/trained_tokens")) for policy in _POLICIES},
        "staleness": {policy: _mean(_series(rows, f"{policy}/buffer/staleness_mean_steps")) for policy in _POLICIES},
    }


def latencies(run: Path) -> dict[str, Any]:
    """Seconds of replies and of whole episodes, of all that the run's archive has."""
    episodes = [episode for path in archive_files(run / "episodes") for episode in read_consumed(path)]
    replies: dict[str, list[float]] = {}
    for episode in filter(_is_whole, episodes):
        for turn in episode.turns:
            replies.setdefault(turn.agent, []).append(turn.generation_s)
    joint = [episode.seconds for episode in filter(_is_whole, episodes)]
    single = float(np.quantile([seconds for of_agent in replies.values() for seconds in of_agent], 0.9))
    return {
        "latency_s": {name: _quantiles(found) for name, found in sorted({**replies, "joint": joint}.items())},
        "p90_joint_over_single": round(float(np.quantile(joint, 0.9)) / single, 3),
        "episodes": len(joint),
    }


def _in_band_of_valid(run: Path) -> list[float]:
    """Of valid proposals those in the band, in the first and the last steps of training."""
    shares: dict[int, list[float]] = {}
    for path in archive_files(run / "episodes"):
        table = pq.read_table(path, columns=["metrics", "step", "outcome"])
        for row in table.to_pylist():
            metrics = json.loads(row["metrics"])
            if row["outcome"] == "trained" and metrics.get("valid"):
                shares.setdefault(row["step"], []).append(metrics["in_band"])
    steps = sorted(shares)
    return [_mean([s for step in of for s in shares[step]]) for of in (steps[:_WINDOW_STEPS], steps[-_WINDOW_STEPS:])]


def _is_whole(episode: Episode) -> bool:
    return episode.failure is None and bool(episode.turns)


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [round(row[name], 4) for row in rows if name in row]


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": round(float(np.quantile(seconds, percent / 100)), 4) for percent in (50, 90)}


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _call(*arguments: str | Path) -> None:
    """Run the program, its output on stderr beside ours."""
    words = list(map(str, arguments))
    done = subprocess.run([sys.executable, "-m", "agentrl.cli.main", *words], stdout=sys.__stderr__, check=False)
    if done.returncode:
        raise SystemExit(f"agentrl {' '.join(words)} ended with {done.returncode}")
