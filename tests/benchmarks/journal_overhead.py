"""What the journal costs a run: the same training with and without it, in turn, on the real engine and trainer.

Part of the benchmark `journal_rate`. The policy does not move (its steps are too small to change a draw) and draws are
seeded, so both runs of a pair play the same episodes and differ by the journal alone; which of them comes first
changes from pair to pair. Figures: `overhead_fraction`, the median over the pairs of the seconds with the journal over
those without, minus 1, and `overhead_low` and `overhead_high`, its bootstrapped 95 % interval. Seconds depend on what
else the machine does; processor time much less: `processor_ms_per_turn` is what the process that runs the rollouts
takes more of it with a journal (median over the pairs), `archiver_ms_per_turn` what the process of its own takes that
archives at low priority, its start included, and `processor_fraction` both over what all processors have in the time
without. `busy_fraction` are the seconds that the journal's own code took (packing on
the event loop, processor time of writing and syncs in its thread) over the wall time; `turns_per_s`.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import re
import resource
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

ROUNDS = 12
STEPS = 50
KINDS = ("none", "segments")
_PROCESSOR_S = re.compile(r"([0-9.]+) s of processor time")
RECIPE = Path(__file__).parents[2] / "environments" / "sql" / "demo.toml"


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


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run again and again: a recipe's run, some steps of it, without evaluations."""

    recipe: Path
    steps: int
    model: Path

    @property
    def first_steps(self) -> int:
        """Steps that do not count: engines and trainer are still warming up."""
        return self.steps // 5


def configuration(folder: Path, work: Workload, kind: str, number: int) -> RunConfig:
    """The run with a policy that stays as it is."""
    overrides = [
        f"name={kind}-{number}",
        f"policies.main.model={work.model}",
        f"runs_folder={folder}",
        f"steps={work.steps}",
        f"journal.kind={kind}",
        "policies.main.trainer.optimizer.learning_rate=1e-12",
        "evaluation.interval_steps=0",
        "evaluation.final_tasks=0",
        f"checkpoint.interval_steps={max(1, work.steps // 2)}",
    ]
    return load_run_config(work.recipe, overrides)


def measure_overhead(folder: Path, work: Workload, rounds: int) -> dict[str, float]:
    """Train in turn with and without a journal, and compare."""
    clock = Clock()
    TimedWriter(clock).install()
    pairs = []
    for number in range(rounds):
        played = {}
        for kind in KINDS if number % 2 else KINDS[::-1]:
            played[kind] = _play(configuration(folder, work, kind, number), work.first_steps)
        pairs.append((played["none"], played["segments"]))
        print(f"pair {number + 1} of {rounds}: {_ratios(pairs)[-1]:.3f}", file=sys.stderr, flush=True)
    low, high = _interval(_ratios(pairs))
    wall_s = sum(with_journal.wall_s for _, with_journal in pairs)
    more_s = [(with_journal.processor_s - without.processor_s) for without, with_journal in pairs]
    archiver_s = [with_journal.archiver_s for _, with_journal in pairs]
    turns = [with_journal.turns for _, with_journal in pairs]
    all_s = map(operator.add, more_s, archiver_s)
    available_s = [without.wall_s * len(os.sched_getaffinity(0)) for without, _ in pairs]
    return {
        "overhead_fraction": round(statistics.median(_ratios(pairs)) - 1, 4),
        "overhead_low": round(low - 1, 4),
        "overhead_high": round(high - 1, 4),
        "processor_ms_per_turn": round(1000 * statistics.median(map(operator.truediv, more_s, turns)), 3),
        "archiver_ms_per_turn": round(1000 * statistics.median(map(operator.truediv, archiver_s, turns)), 3),
        "processor_fraction": round(statistics.median(map(operator.truediv, all_s, available_s)), 5),
        "busy_fraction": round(clock.busy_s / wall_s, 5),
        "step_s_without": round(statistics.median(w.steps_s for w, _ in pairs) / (work.steps - work.first_steps), 4),
        "turns_per_s": round(sum(turns) / wall_s, 1),
        "pairs": rounds,
    }


@dataclass(frozen=True, slots=True)
class _Played:
    """One run: seconds of the steps that count, of all, of processor time here and in the archiver; turns played."""

    steps_s: float
    wall_s: float
    processor_s: float
    archiver_s: float
    turns: int


def _play(config: RunConfig, first_steps: int) -> _Played:
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    run = asyncio.run(start_run(config, SilentObserver())).run
    after = resource.getrusage(resource.RUSAGE_SELF)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return _Played(
        steps_s=sum([row["time/step_s"] for row in rows if "time/step_s" in row][first_steps:]),
        wall_s=time.perf_counter() - started,
        processor_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        archiver_s=_archiver_s(run / "logs" / "archiver.log"),
        turns=sum(json.loads(line)["turns"] for line in (run / "ledger.jsonl").read_text().splitlines()),
    )


def _archiver_s(log: Path) -> float:
    """Processor time of a run's archiver, as the last line of its log says it."""
    return float(_PROCESSOR_S.findall(log.read_text())[-1]) if log.exists() else 0.0


def _ratios(pairs: list[tuple[_Played, _Played]]) -> list[float]:
    return [with_journal.steps_s / without.steps_s for without, with_journal in pairs]


def _interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median."""
    drawn = np.random.default_rng(0).choice(ratios, size=(10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)
