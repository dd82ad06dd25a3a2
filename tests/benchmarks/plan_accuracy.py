"""How far `agentrl plan` is from the runs that it predicts.

Clocked by sleep: runs of the real controller whose engine, environment, scorer and trainer sleep for known times, each
setting with another bottleneck; the plan is given these times. Real: runs of the SQL demo on this machine. Latencies
are measured in three short ones, one in turn, and two that differ in `rollout.concurrency`; the plan is of other
configurations.

Figures: `errors`, the seconds of a step that the plan expects over those that were measured, minus 1, by setting, and
`error_median`, the median of their sizes; `errors_real` alike. `bottlenecks_right` of `bottlenecks`: the plan names the
part that was made the slowest, or in real runs the trainer if it waited for less than a quarter of the time, and the
engines otherwise. `staleness` has the means, planned and measured.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.orchestration.config import RunConfig, load_run_config
from agentrl.process.loop import run_async
from agentrl.sizing.config import rough_latencies
from agentrl.sizing.latencies import DecodeCurve, EpisodeShape, Latencies, Measured, Shapes
from agentrl.sizing.measure import measure
from agentrl.sizing.planning import Plan, make_plan
from agentrl.sizing.setup import setup_of
from agentrl.telemetry.json_lines import read_json_lines
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from agentrl.tokens.chat import ChatFormat
from tests.benchmarks.report import report
from tests.storms.clocked_parts import ClockedEngine, ClockedTrainer, Setting, reply
from tests.storms.simulation import run_config, simulate

PLACES = 24
ROOT = Path(__file__).parents[2]
CLOCKED: dict[str, tuple[str, Setting, int]] = {  # bottleneck, times, max_staleness
    "engines": ("engines", Setting(alone_s=0.006, beside_s=0.0006), 4),
    "environment": ("environment", Setting(alone_s=0.004, step_s=0.5, slots=10), 4),
    "trainer": ("trainer", Setting(alone_s=0.004, train_s=0.6, train_token_s=0.0003), 4),
    "scorer": ("scorer slow", Setting(alone_s=0.004, scorer_s=0.1), 4),
    "in_turn": ("engines", Setting(alone_s=0.005, tail=2.0, train_s=0.2), 0),
}
FIRST_RUNS = {
    "first_in_turn": ["rollout.concurrency=64", "buffer.max_staleness=0"],
    "first_64": ["rollout.concurrency=64"],
    "first_16": ["rollout.concurrency=16"],
}
REAL = {
    "larger_batch": ["rollout.concurrency=32", "buffer.groups_per_step=16"],
    "nearly_in_turn": ["rollout.concurrency=48", "buffer.groups_per_step=4", "buffer.max_staleness=1"],
    "six_epochs": ["policies.main.algorithm.epochs=6", "buffer.group_size=4"],
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan beside the run that it is of."""

    plan: Plan
    step_s: float
    staleness: float
    bottleneck: str

    @property
    def error(self) -> float:
        return self.plan.outcome.step_s / self.step_s - 1

    @property
    def is_right(self) -> bool:
        return self.plan.bottleneck == self.bottleneck


def clocked(folder: Path, model: Path, chat: ChatFormat, name: str, steps: int) -> Compared:
    """One setting, planned and run."""
    bottleneck, setting, max_staleness = CLOCKED[name]
    config = clocked_config(folder / name, model, setting, max_staleness, steps)
    plan = make_plan(setup_of(config, "main"), known_latencies(setting, chat))

    def engine(chat: ChatFormat, *others: Any) -> ClockedEngine:
        return ClockedEngine(chat, *others, setting=setting)

    run_async(simulate(config, chat, engine, trainer=ClockedTrainer(setting)))
    rows = counted(next((folder / name).glob("*/metrics.jsonl")))
    return Compared(plan, mean(rows, "time/step_s"), mean(rows, "buffer/staleness_mean_steps"), bottleneck)


def clocked_config(folder: Path, model: Path, setting: Setting, max_staleness: int, steps: int) -> RunConfig:
    bare = run_config(model, folder, steps, 0, group_size=4, groups_per_step=3, max_staleness=max_staleness)
    table = bare.model_dump(mode="json")
    table["rollout"]["concurrency"] = PLACES
    table["environments"]["sql"] |= {
        "name": "tests.storms.clocked_parts:slow_sql",
        "options": {"step_s": setting.step_s, "slots": setting.slots},
        "scorers": [{"kind": "verifier"}],
    }
    if setting.scorer_s:
        slow = {"kind": "agentrl.testing.scorers:slow", "name": "slow", "latency_s": setting.scorer_s, "late": "wait"}
        table["environments"]["sql"]["scorers"].append({**slow, "concurrency": 1, "batch_turns": 4})
    return RunConfig.model_validate(table)


def known_latencies(setting: Setting, chat: ChatFormat) -> Latencies:
    """The times of a setting, as a person would write them down; lengths are other draws of the script.

    Neither engine nor trainer takes time for prompts, so they have no tokens.
    """

    def known(value: float) -> Measured:
        return Measured(value, "", "the setting")

    def shape(number: int) -> EpisodeShape:
        lengths = [len(chat.complete(reply(setting, f"planned-{number}", turn))) for turn in range(setting.turns)]
        return EpisodeShape(
            (0.0,) * setting.turns, tuple(map(float, lengths)), (setting.step_s,) * (setting.turns - 1) + (0.0,)
        )

    rates = tuple((float(n), n / (setting.alone_s + setting.beside_s * n)) for n in (1, PLACES))
    nothing = ("request_s", "prefill_token_s", "environment_start_s", "environment_score_s", "stage_s")
    return replace(
        rough_latencies(),
        decode=DecodeCurve(rates, "the setting"),
        engine_slots=known(PLACES),
        shapes=Shapes(tuple(shape(number) for number in range(512)), "the script"),
        environment_slots=known(setting.slots),
        trainer_fixed_s=known(setting.train_s),
        trainer_token_s=known(setting.train_token_s),
        publish_s=known(setting.swap_s),
        pause_s=known(setting.swap_s),
        scorers={"slow": known(setting.scorer_s)} if setting.scorer_s else {},
        **{name: known(0.0) for name in nothing},
    )


def make_model(folder: Path) -> Path:
    """The demo's model after a warm start that is shorter than the demo's: how fast it is does not depend on that."""
    recipe = (ROOT / "environments" / "sql" / "warmstart.toml").read_text()
    shorter = recipe.replace("max_steps = 400", "max_steps = 150").replace("max_steps = 200", "max_steps = 60")
    (folder / "warmstart.toml").write_text(shorter.replace("transcripts = 8192", "transcripts = 2048"))
    _agentrl("warmstart", str(folder / "warmstart.toml"), f"output={folder / 'model'}")
    return folder / "model"


def overrides(folder: Path, model: Path, name: str, steps: int) -> list[str]:
    """Settings of a run whose policy stays as it is."""
    return [
        f"name={name}",
        f"policies.main.model={model}",
        f"runs_folder={folder}",
        f"steps={steps}",
        "policies.main.trainer.optimizer.learning_rate=1e-12",
        "evaluation.interval_steps=0",
        "evaluation.final_tasks=0",
        "checkpoint.interval_steps=100000",
        *{**FIRST_RUNS, **REAL}[name],
    ]


def real_run(folder: Path, model: Path, name: str, steps: int) -> Path:
    _agentrl("train", "sql/demo", *overrides(folder, model, name, steps))
    return folder / f"{name}-seed0"


def real(folder: Path, model: Path, name: str, steps: int, known: Latencies) -> Compared:
    """One configuration, planned and run."""
    config = load_run_config(ROOT / "environments" / "sql" / "demo.toml", overrides(folder, model, name, steps))
    plan = make_plan(setup_of(config, "main"), known)
    rows = counted(real_run(folder, model, name, steps) / "metrics.jsonl")
    step_s, wait_s = mean(rows, "time/step_s"), mean(rows, "time/wait_for_batch_s")
    bottleneck = "trainer" if wait_s < step_s / 4 else "engines"
    return Compared(plan, step_s, mean(rows, "buffer/staleness_mean_steps"), bottleneck)


def counted(metrics: Path) -> list[dict[str, float]]:
    """Rows of the steps behind the first third."""
    rows = [row for row in read_json_lines(metrics) if "time/step_s" in row]
    return rows[len(rows) // 3 :]


def mean(rows: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _agentrl(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "agentrl.cli.main", *arguments], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"agentrl {' '.join(arguments)} failed, see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("clocked", "real"), help="leave the other part out")
    parser.add_argument("--clocked-steps", type=int, default=45)
    parser.add_argument("--first-steps", type=int, default=30, help="of the real runs that latencies are measured in")
    parser.add_argument("--real-steps", type=int, default=45)
    parser.add_argument("--model", type=Path, help="the demo's model, if there is one already")
    given = parser.parse_args()
    found: dict[str, Compared] = {}
    in_reality: dict[str, Compared] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentrl-plan-") as text:
        folder = Path(text)
        if given.only != "real":
            model = make_tiny_model(folder / "tiny")
            chat = tiny_chat(model)
            found = {name: clocked(folder, model, chat, name, given.clocked_steps) for name in CLOCKED}
        if given.only != "clocked":
            model = given.model.absolute() if given.model else make_model(folder)
            runs = [real_run(folder, model, name, given.first_steps) for name in FIRST_RUNS]
            known = measure(runs, None, rough_latencies())
            in_reality = {name: real(folder, model, name, given.real_steps, known) for name in REAL}
    everything = {**found, **in_reality}
    report(
        "plan_accuracy",
        errors=_errors(found),
        error_median=_median(found),
        errors_real=_errors(in_reality),
        error_real_most=round(max((abs(c.error) for c in in_reality.values()), default=0.0), 3),
        bottlenecks_right=sum(compared.is_right for compared in everything.values()),
        bottlenecks={name: [c.plan.bottleneck, c.bottleneck] for name, c in everything.items()},
        step_s={name: [round(c.plan.outcome.step_s, 3), round(c.step_s, 3)] for name, c in everything.items()},
        staleness={n: [round(c.plan.outcome.staleness_mean, 2), round(c.staleness, 2)] for n, c in everything.items()},
        clocked_steps=given.clocked_steps,
        real_steps=given.real_steps,
        settings={name: asdict(setting) for name, (_, setting, _) in CLOCKED.items() if name in found},
        seconds=round(time.monotonic() - started),
    )


def _errors(compared: dict[str, Compared]) -> dict[str, float]:
    return {name: round(of.error, 3) for name, of in compared.items()}


def _median(compared: dict[str, Compared]) -> float | None:
    return round(statistics.median(abs(of.error) for of in compared.values()), 3) if compared else None


if __name__ == "__main__":
    main()
