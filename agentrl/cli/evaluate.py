"""``agentrl eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.train import OverridesArgument
from agentrl.process.loop import run_async


@reported
def evaluate(
    target: Annotated[Path, typer.Argument(help="A recipe, or a run folder, whose newest weights are taken.")],
    overrides: OverridesArgument = None,
    tasks: Annotated[int, typer.Option(help="Held-out tasks.")] = 400,
) -> None:
    """Evaluate a policy on held-out tasks."""
    from agentrl.cli.progress import RunProgress
    from agentrl.orchestration.config import load_run_config
    from agentrl.orchestration.launch import evaluate_model
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.types.errors import ConfigError

    if target.is_dir():
        if overrides:
            raise ConfigError("a run folder has its configuration; give a recipe to override it")
        run = RunDirectory.open(target)
        config, model = run.config(), run.newest_model()
    else:
        config = load_run_config(target, overrides or [])
        model = next(iter(config.policies.values())).model
    with RunProgress() as progress:
        evaluation = run_async(evaluate_model(config, model, tasks, progress.on_progress))
        progress.on_evaluation(evaluation)
        if evaluation.num_failed:
            progress.console.print(f"  {evaluation.num_failed} episodes failed and are not in the mean")
