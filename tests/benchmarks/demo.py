"""The demo: a small model learns skills and bad habits by imitation, then drops the habits by reinforcement.

python -m tests.benchmarks.demo --seed 0
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from agentrl.cli.progress import PhaseProgress, RunProgress, print_summary
from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.ending import RunSummary
from agentrl.orchestration.launch import start_run
from agentrl.orchestration.warmstart import WarmStart
from agentrl.orchestration.warmstart_config import load_warmstart_config
from agentrl.process.loop import run_async
from tests.benchmarks.report import report

RECIPES = Path("environments/sql")


def warm_start(seed: int, output: Path) -> None:
    """Make the model of a seed anew."""
    shutil.rmtree(output, ignore_errors=True)
    config = load_warmstart_config(RECIPES / "warmstart.toml", [f"output={output}", f"seed={seed}"])
    with PhaseProgress() as progress:
        made = run_async(WarmStart(config, progress).run())
        progress.console.print(
            f"model: {made.parameters:,} parameters, {made.steps} steps, {made.seconds:.0f} s, "
            f"{made.episode_nats:.2f} nats an unseen episode"
        )


def reinforce(seed: int, model: Path, overrides: list[str]) -> RunSummary:
    """Train the model by the demo's recipe."""
    values = [f"seed={seed}", f"policies.main.model={model}", *overrides]
    config = load_run_config(RECIPES / "demo.toml", values)
    with RunProgress() as progress:
        return run_async(start_run(config, progress))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--installing-since", type=float, default=time.time(), help="when installing began, Unix time")
    parser.add_argument("overrides", nargs="*", help="key.path=value for the recipe demo.toml")
    arguments = parser.parse_args()
    begun = time.time()
    print("1/2  warm start: a model of 0.5 M parameters imitates an expert, then one with bad habits")
    model = Path("models") / f"sql-seed{arguments.seed}"
    warm_start(arguments.seed, model)
    print("2/2  reinforcement: success on held-out databases, whose names were never seen in training")
    summary = reinforce(arguments.seed, model, arguments.overrides)
    print_summary(summary)
    first, last = summary.first_evaluation, summary.last_evaluation
    report(
        "demo",
        success_before=round(first.mean, 4) if first else None,
        success_after=round(last.mean, 4) if last else None,
        seconds=round(time.time() - begun, 1),
        installation_s=round(begun - arguments.installing_since, 1),
        aborted_generations=summary.aborted_generations,
        max_staleness=summary.max_staleness,
        run=str(summary.run),
        seed=arguments.seed,
        heldout_tasks=len(last.rewards) if last else 0,
        steps=summary.version.step,
    )


if __name__ == "__main__":
    main()
