"""Scorers of turns with faults beside episodes that are played, each with its protection and without.

A scorer's process dies or hangs; it answers with what is no number, for another turn, twice, or with several versions
in one batch; it falls behind for good; and the run is killed with scores in flight and goes on.

Figures: `faults` that struck, batches and kills; `hangs`, `invented_zeros` (scores that nobody gave), `wrong_turn`
(scores of another turn or version than they stand beside), `asked_twice` (turns with a score on record, or that had
failed, sent again), `unscored` (no score once a fault was over), `overflow` (turns that waited beyond the bound),
`unsaid` (nothing says what happened); what records and counters `said`, by fault. `found_without_protection`: without
its protection each fault is found; `found` says how many of these there were.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from agentrl.process.loop import run_async
from agentrl.testing.tiny import make_tiny_model
from tests.benchmarks.report import report
from tests.storms.scorer_faults import FAULTS, FaultVerdict, fall_behind, kill, strike

NUM_STRIKES = 3
NUM_KILLS = 5
_NEVER = ("hangs", "invented_zeros", "wrong_turn", "asked_twice", "unscored", "overflow", "unsaid")


def play(folder: Path, model: Path, fault: str, given: argparse.Namespace, is_protected: bool) -> FaultVerdict:
    """One fault."""
    if fault == "killed":
        return kill(folder, model, given.kills, given.seed, is_protected)
    if fault == "behind":
        return run_async(fall_behind(folder, model, is_protected))
    return run_async(strike(folder, model, fault, given.strikes if is_protected else 1, is_protected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=NUM_STRIKES)
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-scorer-faults-") as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        found = {fault: play(folder / fault, model, fault, given, is_protected=True) for fault in FAULTS}
        bare = {fault: play(folder / f"no-{fault}", model, fault, given, is_protected=False) for fault in FAULTS}
    report(
        "scorer_faults",
        faults=sum(verdict.struck for verdict in found.values()),
        **{name: sum(getattr(verdict, name) for verdict in found.values()) for name in _NEVER},
        found_without_protection=all(verdict.num_faults > 0 for verdict in bare.values()),
        found={fault: verdict.num_faults for fault, verdict in bare.items()},
        said={fault: dict(verdict.said) for fault, verdict in found.items()},
        seed=given.seed,
    )


if __name__ == "__main__":
    main()
