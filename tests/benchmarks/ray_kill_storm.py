"""Anything of a run on a Ray cluster is killed at random, 50 times; does it end as one that nothing was killed of?

The cluster has two virtual nodes of four CPUs, the run two workers, two engines, a trainer, and an engine and a worker
of its evaluation. A kill takes one of these, the actor above it, the raylet of a node, a whole node (another is added
then) or the driver (the same command starts it anew, as a job system does).

Figures: `kills`, by victim in `killed`; `turns_lost`, `effects_twice`, `regenerated` (turns made again), `ledger_gaps`
once the run has finished, and what `RunAccount` counts in Parquet and JSON then. `success_after` and
`success_undisturbed` are mean rewards of the last steps, with the `standard_error` of their difference; they are to
differ by no more than three of these. `recovery_s` is the time from a kill to the end of a step that had not begun
then, median and most; `step_s` is that of a step where nothing was killed. `found_without_protection`: with tokens that
do not rise when an episode goes to another worker, and without a journal, turns are lost.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from agentrl.testing.virtual_cluster import VirtualCluster
from tests.benchmarks.report import report
from tests.storms.kill_runs import warm_start
from tests.storms.ray_kills import (
    NODE,
    NUM_NODES,
    STEPS_PER_KILL,
    RayStorm,
    found_without_journal,
    found_without_tokens,
    kill_at_random,
    play_calm,
)

NUM_KILLS = 50
LEAST_STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a warm-started model, instead of making one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-ray-kills-") as name:
        folder = Path(name)
        model = arguments.model.absolute() if arguments.model else warm_start(folder)
        steps = max(STEPS_PER_KILL * arguments.kills, LEAST_STEPS)
        with VirtualCluster.start(NUM_NODES, NODE.cpus, shared=[folder, model]) as cluster:
            calm = play_calm(cluster, folder / "calm", model, steps)
            storm = kill_at_random(cluster, folder / "storm", model, arguments.kills, steps, arguments.seed)
            unprotected = {
                "tokens": found_without_tokens(cluster, folder / "tokens", model, arguments.seed),
                "journal": found_without_journal(cluster, folder / "journal", model, arguments.seed),
            }
        report("ray_kill_storm", **figures(calm, storm, unprotected), seed=arguments.seed)


def figures(calm: RayStorm, storm: RayStorm, unprotected: dict[str, int]) -> dict[str, object]:
    """What the kills did."""
    verdict = storm.run.verdict
    (after, error_after), (undisturbed, error_undisturbed) = storm.success(), calm.success()
    took_s = [seconds for found in storm.recovery_s.values() for seconds in found]
    return {
        "kills": storm.run.kills,
        "killed": {victim: len(found) for victim, found in storm.recovery_s.items()},
        "turns_lost": verdict.turns_lost,
        "effects_twice": verdict.effects_twice,
        "regenerated": verdict.regenerated,
        "ledger_gaps": verdict.ledger_gaps,
        **asdict(storm.run.account),
        "success_after": round(after, 3),
        "success_undisturbed": round(undisturbed, 3),
        "standard_error": round((error_after**2 + error_undisturbed**2) ** 0.5, 3),
        "recovery_s": {"median": round(statistics.median(took_s), 1), "most": round(max(took_s), 1)},
        "recovery_s_by_victim": {v: round(statistics.median(found), 1) for v, found in storm.recovery_s.items()},
        "step_s": round(calm.step_s(), 2),
        "episodes": verdict.num_episodes,
        "calls": verdict.num_turns,
        "found_without_protection": all(unprotected.values()),
        "kills_until_found": unprotected,
    }


if __name__ == "__main__":
    main()
