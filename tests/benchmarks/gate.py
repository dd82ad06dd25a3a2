"""How far trainer and engine disagree about the same tokens under the same weights, in float32.

The demo's recipe runs a few steps on a model of random weights, with a coin for a judge and a large learning
rate: once asynchronously, where the first step has fresh tokens, and once in turn (bound 0, deterministic
engine), where every step has, so that publication and reload are part of the figure. `max_gap`: largest
absolute difference of log-probabilities over all tokens that the very weights being trained had sampled, in
nats.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.launch import start_run
from agentrl.orchestration.recorder import SilentObserver
from agentrl.process.loop import run_async
from agentrl.testing.tiny import make_tiny_model
from agentrl.trainer.config import ModelShape
from tests.benchmarks.report import report

STEPS = 6
SHAPE = ModelShape(vocabulary_tokens=400, context_tokens=2048)


def fresh_rows(folder: str, model: Path, seed: int, max_staleness: int) -> list[dict[str, float]]:
    """Metrics of the steps that had fresh tokens, of one run."""
    overrides = [
        f"name=gate-{max_staleness}",
        f"seed={seed}",
        f"steps={STEPS}",
        f"runs_folder={folder}",
        f"policies.main.model={model}",
        "environment.name=tests.benchmarks.plugins:coin_sql",
        "policies.main.trainer.optimizer.learning_rate=0.05",
        "rollout.limits.max_context_tokens=2048",
        f"buffer.max_staleness={max_staleness}",
        "evaluation.interval_steps=0",
        "evaluation.final_tasks=0",
    ]
    config = load_run_config(Path("environments/sql/demo.toml"), overrides)
    summary = run_async(start_run(config, SilentObserver()))
    rows = [json.loads(line) for line in (summary.run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("trainer/fresh_tokens")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", seed, SHAPE)
        by_bound = {bound: fresh_rows(folder, model, seed, bound) for bound in (1, 0)}
    gaps = {bound: max(row["trainer/fresh_gap_max_nats"] for row in rows) for bound, rows in by_bound.items()}
    rows = [*by_bound[0], *by_bound[1]]
    report(
        "gate",
        max_gap=max(gaps.values()),
        max_gap_float32_engine=gaps[1],
        max_gap_deterministic_engine=gaps[0],
        fresh_tokens=sum(row["trainer/fresh_tokens"] for row in rows),
        steps_with_fresh_tokens=len(rows),
        seed=seed,
    )


if __name__ == "__main__":
    main()
