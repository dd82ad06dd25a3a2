"""Real runs of the SQL environment are killed hundreds of times: is a turn lost, a call carried out twice?

Runs are killed at random moments (the whole run, its trainer, engine or archiver) and at every named crash point.
Every call that the environment carries out is counted in a file of its own; looking at the schema counts as a tool
that acts outside and may never be repeated. After each kill the journal is held against all that earlier ones had on
record.

Figures: `kills` at random, `crash_points` hit, `turns_lost`, `effects_twice`, `regenerated` (turns made again),
`ledger_gaps` once the runs have finished. `found_without_protection`: with acknowledgements before writes, turns are
lost; with calls repeated whose outcome is unknown, effects happen twice.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from agentrl.process.crash_points import CRASH_POINTS
from tests.benchmarks.kill_runs import KilledRun, warm_start
from tests.benchmarks.kill_unprotected import VARIABLE
from tests.benchmarks.report import report

NUM_KILLS = 300
MOST_UNPROTECTED_KILLS = 60
_UNPROTECTED = "tests.benchmarks.kill_unprotected"


def kill_at_random(folder: Path, model: Path, num_kills: int, seed: int) -> KilledRun:
    """One run, killed at random moments, finished at last."""
    run, rng = KilledRun(folder, model), random.Random(seed)
    for number in range(num_kills):
        run.kill_at_random(rng)
        _say(f"kill {number + 1} of {num_kills}: {run.verdict.num_turns} calls, {run.verdict.turns_lost} lost")
    run.finish()
    return run


def kill_at_points(folder: Path, model: Path, points: tuple[str, ...], seed: int) -> tuple[KilledRun, list[str]]:
    """One run that dies once at every crash point; returns it and the points that were not reached."""
    run, rng, missed = KilledRun(folder, model), random.Random(seed), []
    for point in points:
        # A start makes a writer's next segment once.
        if not run.kill_at(point, 1 if point.endswith(".segment_made") else rng.choice((1, 2))):
            missed.append(point)
        _say(f"crash point {point}: {run.verdict.turns_lost} lost, {run.verdict.effects_twice} twice")
    run.finish()
    return run, missed


def found_without(protection: str, folder: Path, model: Path, seed: int) -> int:
    """Kills that it takes to find the loss with a protection off; 0 if they did not find it."""
    os.environ[VARIABLE] = protection
    run, rng = KilledRun(folder, model, _UNPROTECTED), random.Random(seed)
    for number in range(1, MOST_UNPROTECTED_KILLS + 1):
        run.kill_at_random(rng)
        found = run.verdict.turns_lost if protection == "no_sync" else run.verdict.effects_twice
        _say(f"without protection ({protection}), kill {number}: {found} found")
        if found:
            return number
    return 0


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
        episodes=sum(v.num_episodes for v in verdicts),
        calls=sum(v.num_turns for v in verdicts),
        found_without_protection=all(unprotected.values()),
        kills_until_found=unprotected,
        seed=arguments.seed,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
