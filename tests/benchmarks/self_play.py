"""A policy learns Nim by play against a frozen copy of what it began as, by two recipes.

Figures: `success_before` and `success_after`, the share of held-out games that it wins against that opponent, from
start positions that no training game begins with; what `latencies` says of the training episodes; `seconds` of the
training with its evaluations, and `warmstart_seconds` of what comes before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from agentrl.telemetry.json_lines import read_json_lines
from tests.benchmarks.report import report
from tests.storms.agent_latencies import latencies
from tests.storms.agentrl_command import run_agentrl

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
        run_agentrl("warmstart", _RECIPES / "warmstart.toml", f"output={model}", f"seed={seed}")
        warm, began = time.monotonic() - began, time.monotonic()
        models = [f"policies.{policy}.model={model}" for policy in ("main", "opponent")]
        runs = [f"runs_folder={folder / 'runs'}", f"seed={seed}", *arguments.overrides]
        run_agentrl("train", _RECIPES / "nim.toml", *models, *runs)
        run = folder / "runs" / f"nim-seed{seed}"
        rows = read_json_lines(run / "metrics.jsonl")
        success = [round(row["eval/reward_mean"], 4) for row in rows if "eval/reward_mean" in row]
        report(
            "self_play",
            success_before=success[0],
            success_after=success[-1],
            curve=success,
            **latencies(run),
            seconds=round(time.monotonic() - began, 1),
            warmstart_seconds=round(warm, 1),
            seed=seed,
        )


if __name__ == "__main__":
    main()
