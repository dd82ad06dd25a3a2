"""Runs of a proposer and its solver by their recipes, and what their folders say of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from agentrl.journal.archive_names import archive_files
from agentrl.telemetry.json_lines import read_json_lines
from tests.storms.agentrl_command import run_agentrl

_RECIPES = Path(__file__).parents[2] / "environments" / "proposals"
_POLICIES = ("proposer", "solver")
_WINDOW_STEPS = 5


def make(folder: Path, seed: int, **overrides: str) -> None:
    """Warm-start the policies that are not in the folder yet, each with one more override of its recipe if given."""
    for policy, model in _models(folder, seed).items():
        if not model.exists():
            more = [overrides[policy]] if policy in overrides else []
            run_agentrl("warmstart", _RECIPES / f"{policy}.toml", f"output={model}", f"seed={seed}", *more)


def train(folder: Path, seed: int, overrides: Sequence[str]) -> Path:
    """Train the policies of a folder and a seed together; the run's folder.

    Raises:
        FileExistsError: there is a run of that seed already; choose another folder.
    """
    run = folder / "runs" / f"proposals-seed{seed}"
    if run.exists():
        raise FileExistsError(f"{run} is of another run; choose another folder, or remove it")
    models = [f"policies.{policy}.model={model}" for policy, model in _models(folder, seed).items()]
    run_agentrl(
        "train", _RECIPES / "proposals.toml", *models, f"runs_folder={folder / 'runs'}", f"seed={seed}", *overrides
    )
    return run


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


def _in_band_of_valid(run: Path) -> list[float]:
    """Of valid proposals those in the band, in the first and the last steps of training; empty if none was valid."""
    shares: dict[int, list[float]] = {}
    for path in archive_files(run / "episodes"):
        table = pq.read_table(path, columns=["metrics", "step", "outcome"])
        for row in table.to_pylist():
            metrics = json.loads(row["metrics"])
            if row["outcome"] == "trained" and metrics.get("valid"):
                shares.setdefault(row["step"], []).append(metrics["in_band"])
    steps = sorted(shares)
    if not steps:
        return []
    return [_mean([s for step in of for s in shares[step]]) for of in (steps[:_WINDOW_STEPS], steps[-_WINDOW_STEPS:])]


def _models(folder: Path, seed: int) -> dict[str, Path]:
    return {policy: folder / f"{policy}-seed{seed}" for policy in _POLICIES}


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [round(row[name], 4) for row in rows if name in row]


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)
