"""``agentrl demo``: a small model learns skills and bad habits by imitation, then drops the habits by reinforcement.

With a process-reward model between the two: the warm-started model plays, a head on it learns which states lead to
success, and scores each turn of the training while the agent goes on.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.prm import print_report
from agentrl.cli.recipes import OverridesArgument
from agentrl.process.loop import run_async

if TYPE_CHECKING:
    from agentrl.orchestration.config import RunConfig
    from agentrl.orchestration.prm_training import PrmReport
    from agentrl.orchestration.shutdown import RunSummary

ENVIRONMENT = "sql"
OUTCOME_RECIPE = "demo.toml"
PRM_RECIPE = "prm.toml"
_PRM_EPISODES = 512


@reported
@needs("train")
def demo(
    seed: Annotated[int, typer.Option(help="All random numbers of model, tasks and training.")] = 0,
    models: Annotated[Path, typer.Option(help="Folder in which the models are made anew.")] = Path("models"),
    prm: Annotated[
        bool, typer.Option("--prm", help="Fit a process-reward model, and have it score each turn of the training.")
    ] = False,
    overrides: OverridesArgument = None,
) -> None:
    """Train an agent on SQL questions and show that it has learned; ends with a line of JSON."""
    from agentrl.orchestration.preflight import check_recipe

    began = time.monotonic()
    model = models / f"{ENVIRONMENT}-seed{seed}"
    reward_model = models / f"{model.name}-prm"
    given = [f"environment.scorers.prm.model={reward_model}", *(overrides or [])] if prm else overrides or []
    file, phases = (PRM_RECIPE, 3) if prm else (OUTCOME_RECIPE, 2)
    config = _run_config(file, seed, model, given)
    check_recipe(config)
    warm_start(seed, model, phases)
    report = None
    if prm:
        typer.echo(f"2/{phases}  process rewards: a head on that model learns which states lead to success")
        report = fit_prm(config, reward_model)
    typer.echo(
        f"{phases}/{phases}  reinforcement: success on held-out databases, whose names were never seen in training"
    )
    summary = reinforce(seed, model, given, file)
    figures = _figures(seed, summary, time.monotonic() - began)
    if report is not None:
        figures |= _prm_figures(report, summary.run) | compare(summary.run, config, seed)
    typer.echo(json.dumps(figures))


def warm_start(seed: int, output: Path, phases: int = 2) -> None:
    """Make the demo's model of a seed anew, by the environment's ``warmstart.toml``: the first of so many phases."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.warmstart import WarmStart
    from agentrl.orchestration.warmstart_config import load_warmstart_config

    shutil.rmtree(output, ignore_errors=True)
    config = load_warmstart_config(recipe("warmstart.toml"), [f"output={output}", f"seed={seed}"])
    with PhaseProgress() as progress:
        start = WarmStart(config, progress)
        typer.echo(
            f"1/{phases}  warm start: a model of half a million parameters imitates an expert, then one with bad habits"
        )
        made = run_async(start.run())
        progress.console.print(
            f"model: {made.parameters:,} parameters, {made.steps} steps, {made.seconds:.0f} s, "
            f"{made.episode_nats:.2f} nats an unseen episode"
        )


def fit_prm(config: RunConfig, output: Path) -> PrmReport:
    """Fit a process-reward model anew to the outcomes of episodes that the recipe's policy plays."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.config import chosen_policy
    from agentrl.orchestration.prm_training import OUTCOME, PrmTraining, labeller, played_episodes
    from agentrl.trainer.reward_fit import FitOptions

    policy = chosen_policy(config, None)
    settings = config.policies[policy]
    training = PrmTraining(output, settings.model, policy, labeller(OUTCOME, policy), is_replacing=True)
    options = FitOptions(threads=settings.trainer.threads, seed=config.seed)
    with PhaseProgress() as progress:
        episodes = run_async(played_episodes(config, policy, _PRM_EPISODES, progress))
        report = run_async(training.fit(episodes, options, progress))
        print_report(report, output, progress)
    return report


def reinforce(seed: int, model: Path, overrides: list[str], file: str = OUTCOME_RECIPE) -> RunSummary:
    """Train the model by a recipe of the demo, and say how it went."""
    from agentrl.cli.progress import RunProgress, print_summary
    from agentrl.orchestration.launch import start_run

    config = _run_config(file, seed, model, overrides)
    with RunProgress() as progress:
        summary = run_async(start_run(config, progress))
    print_summary(summary, progress.seconds)
    return summary


def compare(run: Path, config: RunConfig, seed: int) -> dict[str, object]:
    """Draw a run's curve beside that of the seed's run by the outcome alone, whose figures are returned.

    Where that has not been made, say how.
    """
    from agentrl.config.loading import load_table
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.telemetry.curve import draw_curve, series
    from agentrl.telemetry.json_lines import read_json_lines

    name = load_table(recipe(OUTCOME_RECIPE))["name"]
    other = config.runs_folder / f"{name}-seed{seed}" / "metrics.jsonl"
    heldout = series(read_json_lines(other), "eval/reward_mean") if other.is_file() else []
    if not heldout:
        typer.echo(f"`agentrl demo --seed {seed}` trains by the outcome alone, for the curve beside this one")
        return {}
    directory = RunDirectory(run)
    draw_curve(directory.metrics, directory.curve, config.name, beside={"by the outcome alone": other})
    step, mean = heldout[-1]
    typer.echo(f"by the outcome alone: {mean:.3f} at step {step}, drawn beside it ({other.parent})")
    return {"outcome_success_after": round(mean, 4)}


def _run_config(file: str, seed: int, model: Path, overrides: list[str]) -> RunConfig:
    from agentrl.orchestration.config import load_run_config

    values = [f"seed={seed}", f"policies.main.model={model}", *overrides]
    return load_run_config(recipe(file), values)


def recipe(file: str) -> Path:
    """A recipe of the demo, as the environment ships it."""
    from agentrl import registry

    return registry.shipped_file(registry.ENVIRONMENTS, ENVIRONMENT, file)


def _prm_figures(report: PrmReport, run: Path) -> dict[str, object]:
    """How well the model told success from failure before the training, and its scores at the training's end."""
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.telemetry.curve import series
    from agentrl.telemetry.json_lines import read_json_lines

    correlations = series(read_json_lines(RunDirectory(run).metrics), "scorer/prm/outcome_correlation")
    return {
        "prm_auc": round(report.quality.auc, 4) if math.isfinite(report.quality.auc) else None,
        "prm_seconds": round(report.seconds, 1),
        "score_outcome_correlation": round(correlations[-1][1], 4) if correlations else None,
    }


def _figures(seed: int, summary: RunSummary, seconds: float) -> dict[str, object]:
    first, last = summary.first_evaluation, summary.last_evaluation
    return {
        "benchmark": "demo",
        "success_before": round(first.mean, 4) if first else None,
        "success_after": round(last.mean, 4) if last else None,
        "seconds": round(seconds, 1),
        "aborted_generations": summary.aborted_generations,
        "max_staleness": summary.max_staleness,
        "run": str(summary.run),
        "seed": seed,
        "heldout_tasks": len(last.rewards) if last else 0,
        "steps": summary.version.step,
    }
