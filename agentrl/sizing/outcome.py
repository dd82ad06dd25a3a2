"""What a simulated run came to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.sizing.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Step:
    """A step: when its weights were staged, how long it waited for its batch, its tokens by staleness."""

    ended_s: float
    waited_s: float
    tokens: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Admission:
    """How the buffer stood when an episode had just begun: what the bound on staleness is about."""

    running: int
    accepted: int
    loaded: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of the steps behind the run's beginning, but for `seconds` and `busy`, which are of all of it.

    `busy` says for which part of the time a part worked: an engine with at least one sequence, the trainer in a step
    or writing weights, a server of a scorer. `staleness` is of sampled tokens, in steps. `trained_fraction` is of the
    sampled tokens of trained episodes: the others are too old.
    """

    steps_per_hour: float
    step_s: float
    wait_s: float
    trained_tokens_per_s: float
    trained_fraction: float
    staleness_mean: float
    staleness_p90: int
    staleness_max: int
    """Of trained tokens."""
    running: float
    engine_tokens_per_s: float
    busy: Mapping[str, float]
    steps: int
    seconds: float


def summarise(run: Simulation) -> Outcome:
    """The figures of a run that has made its steps."""
    num_first = first_steps(len(run.steps))
    counted = run.steps[num_first:]
    seconds = counted[-1].ended_s - (run.steps[num_first - 1].ended_s if num_first else 0.0)
    tokens = dict[int, float]()
    for stale, number in (entry for step in counted for entry in step.tokens.items()):
        tokens[stale] = tokens.get(stale, 0.0) + number
    total = sum(tokens.values())
    trained = {stale: number for stale, number in tokens.items() if stale <= run.setup.max_staleness}
    now = run.clock.now
    step_s = seconds / len(counted)
    return Outcome(
        steps_per_hour=3600 / step_s,
        step_s=step_s,
        wait_s=statistics.fmean(step.waited_s for step in counted),
        trained_tokens_per_s=sum(trained.values()) / seconds,
        trained_fraction=sum(trained.values()) / total,
        staleness_mean=sum(stale * number for stale, number in tokens.items()) / total,
        staleness_p90=_quantile(tokens, 0.9),
        staleness_max=max(trained, default=0),
        running=run.mean_running,
        engine_tokens_per_s=sum(engine.tokens for engine in run.engines) / now,
        busy=_busy(run, now),
        steps=len(counted),
        seconds=now,
    )


def first_steps(steps: int) -> int:
    """Steps that are left out: the run is not yet as it will be."""
    return steps // 3


def _busy(run: Simulation, now: float) -> dict[str, float]:
    episodes = sum(sum(shape.environment_s) for shape in run.latencies.shapes.episodes)
    slots = run.latencies.environment_slots.value
    busy = {
        "engines": statistics.fmean(engine.busy_s for engine in run.engines) / now,
        "trainer": (run.trainer_busy_s + len(run.steps) * run.latencies.stage_s.value) / now,
        "publication": run.publishing_s / now,
    }
    # Of servers without a bound, the share of the places that wait for them.
    busy["environment"] = run.environment.busy_s / (now * min(slots, run.setup.places)) if episodes else 0.0
    for name, servers in run.scorers.items():
        busy[f"scorer {name}"] = servers.busy_s / (now * min(run.setup.scorers[name].slots, run.setup.places))
    return {part: min(fraction, 1.0) for part, fraction in busy.items()}


def _quantile(tokens: Mapping[int, float], fraction: float) -> int:
    left = fraction * sum(tokens.values())
    for stale in sorted(tokens):
        left -= tokens[stale]
        if left <= 0:
            return stale
    return max(tokens)
