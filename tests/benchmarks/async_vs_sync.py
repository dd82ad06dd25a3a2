"""Episodes a second with a staleness bound of 4, against the same code with bound 0.

Runs of the real controller on a virtual clock, as `tests.storms.simulation` has them, with replies of long-tailed
lengths. 32 episodes a step, 32 places.

Figures per policy: `rate_ratio` of episodes a second to bound 0; `slot_utilisation`, the mean share of places
with a generation in flight; `length_ratio`, mean length of the trained over that of all dispatched episodes,
in tokens of the script, but for those of the last steps; `masked_token_fraction` of the tokens that were taken.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.orchestration.config import RunConfig
from agentrl.testing.clock import run_virtual
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from tests.benchmarks.report import report
from tests.storms.simulation import PLACES, TRAIN_STEP_S, Simulation, run_config, simulate

LAST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Result:
    """One simulated run."""

    episodes_per_s: float
    slot_utilisation: float
    length_ratio: float
    masked_token_fraction: float


def summarise(config: RunConfig, simulation: Simulation) -> Result:
    lines = simulation.lines
    last_group = max(line.group for line in lines)
    counted = [line for line in lines if line.group <= last_group - LAST_STEPS * config.buffer.groups_per_step]
    lengths = {line.episode_id: simulation.intended_lengths[line.episode_id] for line in counted}
    trained = [lengths[line.episode_id] for line in counted if line.trained_tokens > 0]
    taken = sum(line.trained_tokens + line.masked_tokens for line in lines)
    return Result(
        episodes_per_s=sum(line.outcome == "trained" for line in lines) / simulation.seconds,
        slot_utilisation=simulation.slot_utilisation,
        length_ratio=statistics.mean(trained) / statistics.mean(lengths.values()),
        masked_token_fraction=sum(line.masked_tokens for line in lines) / taken,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    policies = []
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        chat = tiny_chat(model)

        def measure(policy: str, max_staleness: int, steps: int) -> Result:
            config = run_config(
                model, Path(name), steps, arguments.seed,
                group_size=4, groups_per_step=8, max_staleness=max_staleness, staleness=policy,
            )  # fmt: skip
            return summarise(config, run_virtual(simulate(config, chat)))

        in_turn = measure("mask_spans", 0, max(arguments.steps // 3, LAST_STEPS + 20))
        for policy in ("mask_spans", "wait", "withhold"):
            result = measure(policy, 4, arguments.steps)
            policies.append(
                {
                    "policy": policy,
                    "S": 4,
                    "rate_ratio": round(result.episodes_per_s / in_turn.episodes_per_s, 3),
                    "slot_utilisation": round(result.slot_utilisation, 3),
                    "length_ratio": round(result.length_ratio, 4),
                    "masked_token_fraction": round(result.masked_token_fraction, 4),
                }
            )
    report(
        "async_vs_sync",
        policies=policies,
        in_turn_slot_utilisation=round(in_turn.slot_utilisation, 3),
        episodes_per_step=32,
        places=PLACES,
        steps=arguments.steps,
        train_step_s=TRAIN_STEP_S,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
