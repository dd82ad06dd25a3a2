"""Whether long episodes are trained as often as they are dispatched, against a system that discards the late ones.

Runs as in `async_vs_sync`, 32 episodes a step, 32 places, replies of long-tailed lengths. The cohort are the first
512 groups, 2,048 episodes and their replacements; every run goes on until all of them have been trained or dropped.
An episode counts as trained if a token of it entered a loss; `trained_tokens` counts only those, so that its ratio
shows what masking takes from those episodes, and `masked_token_fraction` what it takes from all.

The naive systems begin an episode anew, with other replies, when new weights come and find it unfinished: at once
(`cut_off`, as synchronous systems with a cut-off do), or if it began more than S steps ago (`bound`). Nothing is
masked there, and lengths are those that the script had in store, in words of filler: discarded replies never got
their tokens.

Figures: ratios of the mean trained to the mean dispatched length with 95 % intervals, cohorts resampled by groups;
`ks`, the Kolmogorov-Smirnov distance of the two distributions. The first ones are of `mask_spans` with S 4.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.buffer.ledger import LedgerLine
from agentrl.buffer.reports import Comparison, closed_cohort, compare
from agentrl.testing.clock import run_virtual
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from tests.benchmarks.report import report
from tests.storms.simulation import ATTEMPTS, PLACES, NaiveEngine, Simulation, TailEngine, run_config, simulate

STEP = {"group_size": 4, "groups_per_step": 8}
COHORT_GROUPS = 512
STEPS = 90  # 16 steps' groups more than the cohort, and what overtook it
POLICIES: tuple[dict[str, Any], ...] = (
    {"max_staleness": 4},
    {"max_staleness": 4, "order_window": 16},
    {"max_staleness": 4, "staleness": "wait"},
    {"max_staleness": 2},
    {"max_staleness": 2, "order_window": 8},
)


def cohort_of(simulation: Simulation) -> list[LedgerLine]:
    closed = closed_cohort(simulation.lines)
    assert max(line.group for line in closed) >= COHORT_GROUPS, "episodes of the cohort are still open: more steps"
    return [line for line in closed if line.group < COHORT_GROUPS]


def compare_protected(simulation: Simulation) -> tuple[Comparison, Comparison, dict[str, Any]]:
    """Whole length, tokens in the loss, and what else is to be told of a run of the real policies."""
    cohort = cohort_of(simulation)
    groups = np.array([line.group for line in cohort])
    sampled = np.array([line.sampled_tokens for line in cohort], float)
    in_loss = np.array([line.trained_tokens for line in cohort], float)
    length = compare("length", sampled, sampled, in_loss > 0, groups)
    tokens = compare("trained tokens", sampled, in_loss, in_loss > 0, groups)
    details = {
        "episodes": len(cohort),
        "episodes_without_loss": int((in_loss == 0).sum()),
        "masked_token_fraction": round(1 - in_loss.sum() / sampled.sum(), 4),
        "slot_utilisation": round(simulation.slot_utilisation, 3),
    }
    return length, tokens, details


def compare_naive(simulation: Simulation) -> tuple[Comparison, dict[str, Any]]:
    cohort = cohort_of(simulation)
    lengths = np.array([simulation.intended_lengths[line.episode_id] for line in cohort], float)
    is_trained = np.array([line.outcome == "trained" for line in cohort])
    groups = np.array([line.group for line in cohort])
    details = {"episodes": len(cohort), "discarded_fraction": round(1 - float(is_trained.mean()), 4)}
    return compare("length", lengths, lengths, is_trained, groups), details


def figures(comparison: Comparison, prefix: str = "length") -> dict[str, Any]:
    return {
        f"{prefix}_ratio": round(comparison.ratio, 4),
        f"{prefix}_ratio_ci": [round(comparison.ratio_low, 4), round(comparison.ratio_high, 4)],
        f"{prefix}_ks": round(comparison.ks, 4),
    }


def measure_all(play: Callable[..., Simulation]) -> dict[str, Any]:
    protected = []
    for policy in POLICIES:
        length, tokens, details = compare_protected(play(TailEngine, 1, **policy))
        protected.append({**policy, **details, **figures(length), **figures(tokens, "trained_tokens")})
    naive = []
    for name, max_steps in (("cut_off", 0), ("bound", 4)):
        engine_kind = partial(NaiveEngine, max_steps=max_steps)
        length, details = compare_naive(play(engine_kind, ATTEMPTS, max_staleness=4))
        naive.append({"naive": name, **details, **figures(length)})
    default = protected[0]
    return {
        "episodes": default["episodes"],
        "length_ratio": default["length_ratio"],
        "length_ratio_ci": default["length_ratio_ci"],
        "ks_default": default["length_ks"],
        "ks_naive_drop": naive[0]["length_ks"],
        "policies": protected,
        "naive": naive,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        chat = tiny_chat(model)

        def play(engine_kind: Callable[..., TailEngine], max_attempts: int, **buffer: Any) -> Simulation:
            config = run_config(model, Path(name), arguments.steps, arguments.seed, **STEP, **buffer)
            return run_virtual(simulate(config, chat, engine_kind, max_attempts))

        found = measure_all(play)
    report("selection_bias", **found, episodes_per_step=32, places=PLACES, steps=arguments.steps, seed=arguments.seed)


if __name__ == "__main__":
    main()
