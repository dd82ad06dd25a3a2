"""``agentrl demo``: a small model learns skills and bad habits by imitation, then drops the habits by reinforcement."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.recipes import OverridesArgument
from agentrl.process.loop import run_async

if TYPE_CHECKING:
    from agentrl.orchestration.config import RunConfig
    from agentrl.orchestration.shutdown import RunSummary

ENVIRONMENT = "sql"


@reported
@needs("train")
def demo(
    seed: Annotated[int, typer.Option(help="All random numbers of model, tasks and training.")] = 0,
    models: Annotated[Path, typer.Option(help="Folder in which the warm-started model is made anew.")] = Path("models"),
    overrides: OverridesArgument = None,
) -> None:
    """Train an agent on SQL questions and show that it has learned; ends with a line of JSON."""
    from agentrl.orchestration.preflight import check_recipe

    began = time.monotonic()
    model = models / f"{ENVIRONMENT}-seed{seed}"
    check_recipe(_run_config(seed, model, overrides or []))
    warm_start(seed, model)
    typer.echo("2/2  reinforcement: success on held-out databases, whose names were never seen in training")
    summary = reinforce(seed, model, overrides or [])
    typer.echo(json.dumps(_figures(seed, summary, time.monotonic() - began)))


def warm_start(seed: int, output: Path) -> None:
    """Make the demo's model of a seed anew, by the environment's ``warmstart.toml``."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.warmstart import WarmStart
    from agentrl.orchestration.warmstart_config import load_warmstart_config

    shutil.rmtree(output, ignore_errors=True)
    config = load_warmstart_config(recipe("warmstart.toml"), [f"output={output}", f"seed={seed}"])
    with PhaseProgress() as progress:
        start = WarmStart(config, progress)
        typer.echo("1/2  warm start: a model of half a million parameters imitates an expert, then one with bad habits")
        made = run_async(start.run())
        progress.console.print(
            f"model: {made.parameters:,} parameters, {made.steps} steps, {made.seconds:.0f} s, "
            f"{made.episode_nats:.2f} nats an unseen episode"
        )


def reinforce(seed: int, model: Path, overrides: list[str]) -> RunSummary:
    """Train the model by the environment's ``demo.toml``, and say how it went."""
    from agentrl.cli.progress import RunProgress, print_summary
    from agentrl.orchestration.launch import start_run

    config = _run_config(seed, model, overrides)
    with RunProgress() as progress:
        summary = run_async(start_run(config, progress))
    print_summary(summary, progress.seconds)
    return summary


def _run_config(seed: int, model: Path, overrides: list[str]) -> RunConfig:
    from agentrl.orchestration.config import load_run_config

    values = [f"seed={seed}", f"policies.main.model={model}", *overrides]
    return load_run_config(recipe("demo.toml"), values)


def recipe(file: str) -> Path:
    """A recipe of the demo, as the environment ships it."""
    from agentrl import registry

    return registry.shipped_file(registry.ENVIRONMENTS, ENVIRONMENT, file)


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
