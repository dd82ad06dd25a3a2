"""Whether what is trained has the declared shares of the environments when one is ten times slower than the others.

Runs of the real controller on a virtual clock, as `tests.storms.simulation` has them, over three environments of
weights 2, 1 and 1; tokens of the third take ten times as long. 32 episodes a step, 32 places.

Figures by environment: `declared` shares, `trained` shares of the trained groups, `trained_episodes` of the trained
episodes. `off_by_groups` is the largest distance of a share from the declared one after any step, in groups.
`seconds` of the run beside those of a run without the slow one's handicap, and `slot_utilisation` of both.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.buffer.ledger import LedgerLine
from agentrl.orchestration.config import RunConfig
from agentrl.testing.clock import run_virtual
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from tests.benchmarks.report import report
from tests.storms.simulation import PLACES, Simulation, run_config, simulate

WEIGHTS = {"first": 2.0, "second": 1.0, "slow": 1.0}
SLOWNESS = {"slow": 10.0}
STEP = {"group_size": 4, "groups_per_step": 8}


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Fractions of the sum."""
    return {name: round(counts[name] / sum(counts.values()), 4) for name in WEIGHTS}


def trained_groups(lines: Iterable[LedgerLine]) -> dict[int, tuple[int, str]]:
    """Of each trained group the step and the environment."""
    return {line.group: (line.step, line.environment) for line in lines if line.outcome == "trained"}


def off_by_groups(groups: Iterable[tuple[int, str]]) -> float:
    """How many groups an environment had too many or too few of after some step, at most."""
    taken: Counter[str] = Counter()
    found, step_before, total = 0.0, 0, sum(WEIGHTS.values())
    for step, environment in [*sorted(groups), (1 << 62, "")]:
        if step != step_before:
            distances = [abs(taken[name] - taken.total() * weight / total) for name, weight in WEIGHTS.items()]
            found, step_before = max(found, *distances), step
        taken[environment] += 1
    return found


def mixed_config(model: Path, folder: Path, steps: int, seed: int) -> RunConfig:
    """A run over the three environments."""
    config = run_config(model, folder, steps, seed, **STEP)
    [section] = config.environments.values()
    environments = {name: section.model_copy(update={"weight": weight}) for name, weight in WEIGHTS.items()}
    return config.model_copy(update={"environments": environments})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        chat = tiny_chat(model)

        def play(slowness: Mapping[str, float]) -> Simulation:
            config = mixed_config(model, Path(name), arguments.steps, arguments.seed)
            return run_virtual(simulate(config, chat, slowness=slowness))

        alike, mixed = play({}), play(SLOWNESS)
    groups = trained_groups(mixed.lines)
    report(
        "environment_mix",
        declared=shares(WEIGHTS),
        trained=shares(Counter(environment for _, environment in groups.values())),
        trained_episodes=shares(Counter(line.environment for line in mixed.lines if line.outcome == "trained")),
        off_by_groups=off_by_groups(groups.values()),
        trained_groups=len(groups),
        slowness=SLOWNESS,
        seconds=round(mixed.seconds),
        seconds_if_none_is_slow=round(alike.seconds),
        slot_utilisation=round(mixed.slot_utilisation, 3),
        slot_utilisation_if_none_is_slow=round(alike.slot_utilisation, 3),
        places=PLACES,
        steps=arguments.steps,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
