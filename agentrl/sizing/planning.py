"""What a simulation says to a person: the bottleneck, what would be faster, and how to share out GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl.sizing.latencies import Latencies
from agentrl.sizing.outcome import Outcome
from agentrl.sizing.setup import Setup
from agentrl.sizing.simulation import simulate
from agentrl.types.errors import ConfigError

FASTER = 1.2
MOST_STEPS, LEAST_STEPS, TURNS = 60, 18, 40_000


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of engines and of the trainer, and what comes of it."""

    engines: int
    ranks: int
    gpus: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """What is expected of a run.

    `gains` says by how much of itself the run is faster if a part is 1.2 times as fast; `changes` the same of settings
    of the recipe. `splits` are of a number of GPUs, the fastest first.
    """

    setup: Setup
    outcome: Outcome
    gains: Mapping[str, float]
    changes: Mapping[str, float]
    splits: tuple[Split, ...] = ()

    @property
    def bottleneck(self) -> str:
        """The part that gains most."""
        return max(self.gains, key=lambda part: self.gains[part])


def make_plan(setup: Setup, latencies: Latencies, gpus: int | None = None, seed: int = 0) -> Plan:
    """Simulate a run as it is, with each part faster, with other settings, and for each split of some GPUs.

    Raises:
        ConfigError: the run would stand still, or the GPUs are too few.
    """
    if gpus is not None:
        check_gpus(setup, gpus)
    steps = steps_to_simulate(setup, latencies)
    outcome = simulate(setup, latencies, steps, seed)

    def gain(setup: Setup, latencies: Latencies) -> float:
        return simulate(setup, latencies, steps, seed).steps_per_hour / outcome.steps_per_hour - 1

    parts = [part for part in latencies.parts if _is_part(part, setup)]
    gains = {part: gain(setup, latencies.with_faster(part, FASTER)) for part in parts}
    more = {
        "rollout.concurrency": replace(setup, places=round(FASTER * setup.places)),
        "buffer.max_staleness + 1": replace(setup, max_staleness=setup.max_staleness + 1),
        "one engine more": replace(setup, engines=setup.engines + 1),
    }
    changes = {name: gain(changed, latencies) for name, changed in more.items()}
    splits = () if gpus is None else make_splits(setup, latencies, gpus, steps, seed)
    return Plan(setup, outcome, gains, changes, splits)


def make_splits(setup: Setup, latencies: Latencies, gpus: int, steps: int, seed: int = 0) -> tuple[Split, ...]:
    """Each split of some GPUs between engines and trainer ranks, the fastest first. Raises ConfigError."""
    check_gpus(setup, gpus)
    splits = []
    for engines in range(1, (gpus - 1) // setup.gpus_per_engine + 1):
        ranks = gpus - engines * setup.gpus_per_engine
        changed = replace(setup, engines=engines, ranks=ranks, colocated=False)
        splits.append(Split(engines, ranks, gpus, simulate(changed, latencies, steps, seed)))
    return tuple(sorted(splits, key=lambda split: -split.outcome.steps_per_hour))


def check_gpus(setup: Setup, gpus: int) -> None:
    """Raises ConfigError if an engine and a trainer rank have no room on so many GPUs."""
    least = setup.gpus_per_engine + 1
    if gpus < least:
        raise ConfigError(
            f"{gpus} GPUs are too few: an engine takes {setup.gpus_per_engine} and the trainer 1, so give --gpus "
            f"{least} or more"
        )


def steps_to_simulate(setup: Setup, latencies: Latencies) -> int:
    """Enough for steady figures, and so few that a plan takes seconds."""
    of_a_step = setup.episodes_per_step * latencies.shapes.turns
    least = LEAST_STEPS if setup.max_staleness > LEAST_STEPS else max(LEAST_STEPS, 4 * int(setup.max_staleness + 1))
    return max(least, min(MOST_STEPS, round(TURNS / of_a_step)))


def _is_part(part: str, setup: Setup) -> bool:
    return not part.startswith("scorer ") or part.removeprefix("scorer ") in setup.scorers
