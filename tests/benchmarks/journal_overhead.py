"""What the journal costs a run: the same training with and without it, in turn, on the real engine and trainer.

Part of the benchmark `journal_rate`. The policy does not move (its steps are too small to change a draw) and draws are
seeded, so both runs of a pair play the same episodes and differ by the journal alone; which of them comes first
changes from pair to pair. Figures: `overhead_fraction`, the median over the pairs of the seconds with the journal over
those without, minus 1, and `overhead_low` and `overhead_high`, its bootstrapped 95 % interval; `busy_fraction`, the
seconds that the journal's own code took (packing on the event loop, processor time of writing and syncs in its thread)
over the wall time; `turns_per_s`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.config import RunConfig, load_run_config
from agentrl.orchestration.launch import start_run
from agentrl.orchestration.recorder import SilentObserver
from tests.benchmarks.kill_runs import warm_start

ROUNDS = 12
STEPS = 20
FIRST_STEPS = 4  # engines and trainer are still warming up
KINDS = ("none", "segments")
_RECIPE = Path(__file__).parents[2] / "environments" / "sql" / "demo.toml"


@dataclass(slots=True)
class Clock:
    """Seconds that the journal's own code has taken in this process, on the loop and in its thread."""

    busy_s: float = 0.0


class TimedWriter:
    """Times what a writer does, wherever it is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._add, self._write = JournalWriter._add, JournalWriter._write

    def install(self) -> None:
        """All writers are timed from here on."""
        clock, add, write = self._clock, self._add, self._write

        def timed_add(writer, *entry):
            started = time.perf_counter()
            try:
                return add(writer, *entry)
            finally:
                clock.busy_s += time.perf_counter() - started

        def timed_write(writer, entries):
            started = time.thread_time()
            write(writer, entries)
            clock.busy_s += time.thread_time() - started

        JournalWriter._add, JournalWriter._write = timed_add, timed_write  # type: ignore[method-assign]


def configuration(folder: Path, model: Path, kind: str, number: int) -> RunConfig:
    """The demo's run, a few steps of it, without evaluations and with a policy that stays as it is."""
    overrides = [
        f"name={kind}-{number}",
        f"policies.main.model={model}",
        f"runs_folder={folder}",
        f"steps={STEPS}",
        f"journal.kind={kind}",
        "policies.main.trainer.optimizer.learning_rate=1e-12",
        "evaluation.interval_steps=0",
        "evaluation.final_tasks=0",
        "checkpoint.interval_steps=8",
    ]
    return load_run_config(_RECIPE, overrides)


def run_seconds(run: Path) -> float:
    """Seconds that the steps took together, but for the first ones."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum([row["time/step_s"] for row in rows if "time/step_s" in row][FIRST_STEPS:])


def measure_overhead(folder: Path, model: Path | None, rounds: int) -> dict[str, float]:
    """Train in turn with and without a journal, and compare."""
    clock = Clock()
    TimedWriter(clock).install()
    ratios, steps_s = [], []
    wall_s = turns = 0.0
    model = model or warm_start(folder)
    for number in range(rounds):
        seconds = {}
        for kind in KINDS if number % 2 else KINDS[::-1]:
            started = time.perf_counter()
            summary = asyncio.run(start_run(configuration(folder, model, kind, number), SilentObserver()))
            seconds[kind] = run_seconds(summary.run)
            if kind == "segments":
                wall_s += time.perf_counter() - started
                turns += _turns(summary.run)
        ratios.append(seconds["segments"] / seconds["none"])
        steps_s.append(seconds["none"] / (STEPS - FIRST_STEPS))
        print(f"pair {number + 1} of {rounds}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    low, high = _interval(ratios)
    return {
        "overhead_fraction": round(statistics.median(ratios) - 1, 4),
        "overhead_low": round(low - 1, 4),
        "overhead_high": round(high - 1, 4),
        "busy_fraction": round(clock.busy_s / wall_s, 5),
        "step_s_without": round(statistics.median(steps_s), 4),
        "turns_per_s": round(turns / wall_s, 1),
    }


def _interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median."""
    drawn = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def _turns(run: Path) -> int:
    return sum(json.loads(line)["turns"] for line in (run / "ledger.jsonl").read_text().splitlines())
