"""The demo with shuffled rewards: what a run gains when rewards say nothing. It must gain nothing.

It may lose: steps that follow chance move a policy too, with AdamW as far as steps that follow rewards.

Figures: `success_before` and `success_after` on held-out tasks with true rewards, and their `change`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from agentrl.cli.demo import reinforce, warm_start
from tests.benchmarks.report import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="warm-started model; made anew if not given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = arguments.model or Path(name) / "model"
        if arguments.model is None:
            warm_start(arguments.seed, model)
        overrides = [
            "environment.name=tests.benchmarks.plugins:shuffled_sql",
            "name=sql-control",
            f"runs_folder={name}",
        ]
        summary = reinforce(arguments.seed, model, overrides)
    first, last = summary.first_evaluation, summary.last_evaluation
    if first is None or last is None:
        raise SystemExit("the recipe evaluates nothing")
    report(
        "control",
        success_before=round(first.mean, 4),
        success_after=round(last.mean, 4),
        change=round(last.mean - first.mean, 4),
        heldout_tasks=len(last.rewards),
        steps=summary.version.step,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
