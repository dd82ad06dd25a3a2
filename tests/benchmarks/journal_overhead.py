"""What the journal costs a run: the same training with and without it, on the real engine and trainer.

Part of the benchmark `journal_rate`. The policy does not move (its steps are too small to change a draw) and draws are
seeded, so both runs of a pair play the same episodes and differ by the journal alone. They have the machine in turn,
half a second each, so that what else it does befalls both alike.

Figures: `overhead_fraction`, the seconds a turn with the journal over those without, minus 1, in all pairs together,
and `overhead_low` and `overhead_high`, its 95 % interval, bootstrapped over the pairs. Seconds are those of the steps
that count, turns those of the episodes that were consumed by them: which episodes come in time for a step is the one
thing in which the runs of a pair differ. `steps_fraction` is the same of the seconds alone. `processor_fraction` is
what all processes of a run together take more processor time a turn with a journal, their starts included (median over
the pairs), and `processor_ms_per_turn` the same in milliseconds; `turns_per_s`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.buffer.ledger import read_ledger
from tests.storms.in_turn import Program, run_in_turn

ROUNDS = 8
STEPS = 150
KINDS = ("none", "segments")
_CHECKPOINTS = 5
RECIPE = Path(__file__).parents[2] / "environments" / "sql" / "demo.toml"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run again and again: a recipe's run, some steps of it, without evaluations."""

    recipe: Path
    steps: int
    model: Path

    @property
    def first_steps(self) -> int:
        """Steps that do not count: engines and trainer are still warming up."""
        return max(1, self.steps // 10)

    def overrides(self, folder: Path, kind: str, number: int) -> list[str]:
        """Settings of a run whose policy stays as it is."""
        return [
            f"name={kind}-{number}",
            f"policies.main.model={self.model}",
            f"runs_folder={folder}",
            f"steps={self.steps}",
            f"journal.kind={kind}",
            "policies.main.trainer.optimizer.learning_rate=1e-12",
            "evaluation.interval_steps=0",
            "evaluation.final_tasks=0",
            f"checkpoint.interval_steps={max(1, self.steps // _CHECKPOINTS)}",
        ]


@dataclass(frozen=True, slots=True)
class _Played:
    """One run: seconds and turns of the steps that count and of all steps, and processor time of all."""

    steps_s: float
    steps_turns: int
    wall_s: float
    turns: int
    processor_s: float

    @property
    def processor_ms_per_turn(self) -> float:
        """Of all its processes."""
        return 1000 * self.processor_s / self.turns


@dataclass(slots=True)
class _Player:
    """A run under way, and where it leaves what."""

    program: Program
    folder: Path
    name: str
    work: Workload

    @classmethod
    def start(cls, folder: Path, work: Workload, kind: str, number: int) -> _Player:
        name, overrides = f"{kind}-{number}", work.overrides(folder, kind, number)
        command = [sys.executable, "-m", "tests.benchmarks.journal_run", str(work.recipe), *overrides]
        return cls(Program(subprocess.Popen(command)), folder, name, work)

    def times(self) -> list[float]:
        """When steps ended, on the wall's clock."""
        lines = [line for path in self.folder.glob(f"{self.name}-*/metrics.jsonl") for line in path.open()]
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row["time"] for row in rows if "time/step_s" in row]

    def is_done(self) -> bool:
        """Whether all steps were done, or the run has failed."""
        return self.program.is_over or len(self.times()) >= self.work.steps

    def played(self) -> _Played:
        """Raises SystemExit if the run failed."""
        if self.program.process.wait():
            raise SystemExit(f"run {self.name} failed, see above")
        times, active_s, first_steps = self.times(), self.program.active_s, self.work.first_steps
        ledger = [line for path in self.folder.glob(f"{self.name}-*/ledger.jsonl") for line in read_ledger(path)]
        return _Played(
            steps_s=active_s(times[-1]) - active_s(times[first_steps - 1]),
            steps_turns=sum(line.turns for line in ledger if line.step > first_steps),
            wall_s=active_s(times[-1]),
            turns=sum(line.turns for line in ledger),
            processor_s=sum(self.program.processor_s.values()),
        )


Pair = tuple[_Played, _Played]


def measure_overhead(folder: Path, work: Workload, rounds: int) -> dict[str, float]:
    """Train with and without a journal, in turn, and compare."""
    pairs: list[Pair] = []
    for number in range(rounds):
        pairs.append(_play_pair(folder, work, number))
        work_of = " and ".join(f"{played.steps_turns} turns in {played.steps_s:.2f} s" for played in pairs[-1])
        processor = " and ".join(f"{played.processor_ms_per_turn:.3f}" for played in pairs[-1])
        figures = f"{_ratio(pairs[-1:]):.4f} ({work_of}; {processor} ms of processor time a turn)"
        print(f"pair {number + 1} of {rounds}: {figures}", file=sys.stderr, flush=True)
    low, high = _interval(pairs)
    wall_s = sum(with_journal.wall_s for _, with_journal in pairs)
    turns = sum(with_journal.turns for _, with_journal in pairs)
    processor_ms = [
        (without.processor_ms_per_turn, with_journal.processor_ms_per_turn) for without, with_journal in pairs
    ]
    return {
        "overhead_fraction": round(_ratio(pairs) - 1, 4),
        "overhead_low": round(low - 1, 4),
        "overhead_high": round(high - 1, 4),
        "steps_fraction": round(sum(w.steps_s for _, w in pairs) / sum(w.steps_s for w, _ in pairs) - 1, 4),
        "processor_fraction": round(statistics.median(more / less - 1 for less, more in processor_ms), 4),
        "processor_ms_per_turn": round(statistics.median(more - less for less, more in processor_ms), 3),
        "step_s_without": round(statistics.mean(w.steps_s for w, _ in pairs) / (work.steps - work.first_steps), 4),
        "turns_per_s": round(turns / wall_s, 1),
        "pairs": rounds,
    }


def _play_pair(folder: Path, work: Workload, number: int) -> Pair:
    """Which of both begins changes from pair to pair."""
    players = {kind: _Player.start(folder, work, kind, number) for kind in KINDS}
    in_order = [players[kind] for kind in (KINDS if number % 2 else KINDS[::-1])]
    run_in_turn([player.program for player in in_order], lambda: all(player.is_done() for player in in_order))
    return players["none"].played(), players["segments"].played()


def _ratio(pairs: list[Pair]) -> float:
    """Seconds a turn with the journal over those without."""
    without_s, with_journal_s = (
        sum(played.steps_s for played in side) / sum(played.steps_turns for played in side)
        for side in zip(*pairs, strict=True)
    )
    return with_journal_s / without_s


def _interval(pairs: list[Pair]) -> tuple[float, float]:
    """The 95 % interval of the ratio."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(pairs), size=(10_000, len(pairs)))
    low, high = np.quantile([_ratio([pairs[index] for index in row]) for row in drawn], (0.025, 0.975))
    return float(low), float(high)
