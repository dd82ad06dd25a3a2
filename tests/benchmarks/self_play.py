"""A policy learns Nim by play against a frozen copy of what it began as, by two recipes.

Figures: `success_before` and `success_after`, the share of held-out games that it wins against that opponent, from
start positions that no training game begins with; `latency_s`, p50 and p90 over the training episodes, of each agent
(what its replies take in an episode) and of the joint episode; `seconds` of the training with its evaluations, and
`warmstart_seconds` of what comes before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl.journal.archive_file import read_consumed
from agentrl.telemetry.json_lines import read_json_lines
from agentrl.types.episode import Episode
from tests.benchmarks.report import report

_RECIPES = Path(__file__).parents[2] / "environments" / "nim"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="key.path=value of the training")
    arguments = parser.parse_args()
    seed = arguments.seed
    with tempfile.TemporaryDirectory(prefix="agentrl-self-play-") as name:
        folder = Path(name)
        model, began = folder / "model", time.monotonic()
        _call("warmstart", str(_RECIPES / "warmstart.toml"), f"output={model}", f"seed={seed}")
        warm, began = time.monotonic() - began, time.monotonic()
        models = [f"policies.{policy}.model={model}" for policy in ("main", "opponent")]
        runs = [f"runs_folder={folder / 'runs'}", f"seed={seed}", *arguments.overrides]
        _call("train", str(_RECIPES / "nim.toml"), *models, *runs)
        run = folder / "runs" / f"nim-seed{seed}"
        rows = read_json_lines(run / "metrics.jsonl")
        success = [round(row["eval/reward_mean"], 4) for row in rows if "eval/reward_mean" in row]
        report(
            "self_play",
            success_before=success[0],
            success_after=success[-1],
            curve=success,
            latency_s=_latencies(run),
            seconds=round(time.monotonic() - began, 1),
            warmstart_seconds=round(warm, 1),
            seed=seed,
        )


def _call(*arguments: str) -> None:
    """Run the program, its output on stderr beside ours."""
    done = subprocess.run([sys.executable, "-m", "agentrl.cli.main", *arguments], stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"agentrl {json.dumps(arguments)} ended with {done.returncode}")


def _latencies(run: Path) -> dict[str, dict[str, float]]:
    files = sorted((run / "episodes").glob("consumed-*.parquet"))
    episodes = [episode for file in files for episode in read_consumed(file) if episode.failure is None]
    agents = sorted({turn.agent for episode in episodes for turn in episode.turns})
    of_each = {agent: [_spent(episode, agent) for episode in episodes] for agent in agents}
    return {name: _quantiles(of) for name, of in {**of_each, "joint": [e.seconds for e in episodes]}.items()}


def _spent(episode: Episode, agent: str) -> float:
    return sum(turn.generation_s for turn in episode.turns if turn.agent == agent)


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": round(float(np.percentile(seconds, share)), 4) for share in (50, 90)}


if __name__ == "__main__":
    main()
