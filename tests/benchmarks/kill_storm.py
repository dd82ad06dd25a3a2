"""Real runs of the SQL environment are killed hundreds of times: is a turn lost, a call carried out twice?

Runs are killed at random moments (the whole run, its trainer, engine or archiver) and at every named crash point.
Every call that the environment carries out is counted in a file of its own; looking at the schema counts as a tool
that acts outside and may never be repeated. After each kill the journal is held against all that earlier ones had on
record.

Figures: `kills` at random, `crash_points` hit, `turns_lost`, `effects_twice`, `regenerated` (turns made again),
`ledger_gaps` once the runs have finished; and of both runs what `RunAccount` counts in Parquet and JSON:
`archive_missing`, `archive_doubled`, `archive_differs`, `goodput_tokens_lost`, `sessions_open`, `temporary_left`.
`found_without_protection`: with acknowledgements before writes, turns are lost; with calls repeated whose outcome is
unknown, effects happen twice.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from agentrl.process.crash_points import CRASH_POINTS
from tests.benchmarks.report import report
from tests.storms.kill_runs import warm_start
from tests.storms.kill_storm import found_without, kill_at_points, kill_at_random

NUM_KILLS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-kills-") as name:
        folder = Path(name)
        model = warm_start(folder)
        random_kills = kill_at_random(folder / "random", model, arguments.kills, arguments.seed)
        at_points, missed = kill_at_points(folder / "points", model, CRASH_POINTS, arguments.seed)
        unprotected = {p: found_without(p, folder / p, model, arguments.seed) for p in ("no_sync", "retry")}
    verdicts = (random_kills.verdict, at_points.verdict)
    report(
        "kill_storm",
        kills=random_kills.kills,
        crash_points=len(CRASH_POINTS) - len(missed),
        crash_points_missed=missed,
        turns_lost=sum(v.turns_lost for v in verdicts),
        effects_twice=sum(v.effects_twice for v in verdicts),
        regenerated=sum(v.regenerated for v in verdicts),
        ledger_gaps=sum(v.ledger_gaps for v in verdicts),
        **asdict(random_kills.account + at_points.account),
        episodes=sum(v.num_episodes for v in verdicts),
        calls=sum(v.num_turns for v in verdicts),
        found_without_protection=all(unprotected.values()),
        kills_until_found=unprotected,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
