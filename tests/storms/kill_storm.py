"""Real runs of the SQL environment, killed at random moments, at every crash point, and with a protection off.

Runs are killed whole, or only their trainer, engine or archiver. After each kill the journal is held against all that
earlier ones had on record; looking at the schema counts as a tool that acts outside and may never be repeated.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from tests.storms.kill_runs import PARTNER, KilledRun
from tests.storms.kill_unprotected import VARIABLE

MOST_UNPROTECTED_KILLS = 60
ONCE = ("worker.segment_made", "buffer.segment_made", "run.ended")
_UNPROTECTED = "tests.storms.kill_unprotected"


def kill_at_random(folder: Path, model: Path, num_kills: int, seed: int) -> KilledRun:
    """One run, killed at random moments, finished at last."""
    return _kill_at_random(KilledRun(folder, model), num_kills, seed)


def kill_partners_at_random(folder: Path, model: Path, num_kills: int, seed: int) -> KilledRun:
    """One run of two policies that act in the same episodes, killed at random moments, finished at last."""
    overrides = (*PARTNER, f"policies.partner.model={model}")
    return _kill_at_random(KilledRun(folder, model, overrides=overrides), num_kills, seed)


def kill_at_points(folder: Path, model: Path, points: tuple[str, ...], seed: int) -> tuple[KilledRun, list[str]]:
    """One run that dies once at every crash point; returns it and the points that were not reached."""
    run, rng, missed = KilledRun(folder, model), random.Random(seed), []
    for point in points:
        # A start makes a writer's next segment once, and comes to the run's end once.
        if not run.kill_at(point, 1 if point in ONCE else rng.choice((1, 2))):
            missed.append(point)
        _say(f"crash point {point}: {run.verdict.turns_lost} lost, {run.verdict.effects_twice} twice")
    run.finish()
    return run, missed


def found_without(protection: str, folder: Path, model: Path, seed: int) -> int:
    """Kills that it takes to find the loss with a protection off; 0 if they did not find it.

    What was acknowledged before it was written is lost by kills at random. A call whose outcome is unknown is one
    whose worker died between the call and its result, which a kill at random seldom meets.
    """
    os.environ[VARIABLE] = protection
    run, rng = KilledRun(folder, model, _UNPROTECTED), random.Random(seed)
    for number in range(1, MOST_UNPROTECTED_KILLS + 1):
        if protection == "no_sync":
            run.kill_at_random(rng)
        else:
            run.kill_at("effect.dispatched", rng.choice((1, 2, 3)))
        found = run.verdict.turns_lost if protection == "no_sync" else run.verdict.effects_twice
        _say(f"without protection ({protection}), kill {number}: {found} found")
        if found:
            return number
    return 0


def _kill_at_random(run: KilledRun, num_kills: int, seed: int) -> KilledRun:
    rng = random.Random(seed)
    for number in range(num_kills):
        run.kill_at_random(rng)
        _say(f"kill {number + 1} of {num_kills}: {run.verdict.num_turns} calls, {run.verdict.turns_lost} lost")
    run.finish()
    return run


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
