"""Rollout workers of a run are killed while commands run in sandboxes that count them, 100 times.

Figures: `kills`, `effects_twice` (calls that a sandbox counted twice), `turns_lost`, `regenerated`, `ledger_gaps`, what
`RunAccount` counts at the end, `left_over` temporary folders (the storm fails if a process of the run is left, its
keeper and the commands in sandboxes included), `calls` that were counted and `handed_over` episodes.
`found_without_protection`: where commands have new ids when a worker goes on, one runs twice; `kills_until_found`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.report import report
from tests.storms.kill_runs import warm_start
from tests.storms.worker_storm import IN_SANDBOX, found_without_effect_ids, kill_workers, metric

NUM_KILLS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-kills-") as name:
        folder = Path(name)
        model = warm_start(folder)
        run = kill_workers(folder / "storm", model, arguments.kills, arguments.seed, IN_SANDBOX)
        found = found_without_effect_ids(folder / "unprotected", model, arguments.seed)
        counted = (folder / "storm" / "count.txt").read_text().count("\n")
    verdict = run.verdict
    report(
        "sandbox_kills",
        kills=arguments.kills,
        effects_twice=verdict.effects_twice,
        turns_lost=verdict.turns_lost,
        regenerated=verdict.regenerated,
        ledger_gaps=verdict.ledger_gaps,
        left_over=run.account.temporary_left,
        **asdict(run.account),
        episodes=verdict.num_episodes,
        calls=counted,
        handed_over=metric(run, "workers/handed_over_total"),
        found_without_protection=found > 0,
        kills_until_found=found,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
