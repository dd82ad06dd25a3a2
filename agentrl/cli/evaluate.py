"""``agentrl eval``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.recipes import OverridesArgument, find_recipe
from agentrl.process.loop import run_async


@reported
@needs("train")
def evaluate(
    target: Annotated[Path, typer.Argument(help="A recipe, or a run folder, whose newest weights are taken.")],
    overrides: OverridesArgument = None,
    tasks: Annotated[int, typer.Option(min=1, help="Held-out tasks of each environment.")] = 400,
    policy: Annotated[str | None, typer.Option(help="Whose reward; not needed where one policy is trained.")] = None,
) -> None:
    """Evaluate a policy on held-out tasks."""
    from agentrl.cli.progress import RunProgress
    from agentrl.orchestration.config import chosen_policy, load_run_config
    from agentrl.orchestration.launch import evaluate_model
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.types.errors import ConfigError
    from agentrl.types.version import FIRST_VERSION
    from agentrl.weights.digests import check_folder

    if os.path.isdir(target):
        if overrides:
            raise ConfigError("a run folder has its configuration; give a recipe to override it")
        run = RunDirectory.open(target)
        config = run.config()
        models = {name: run.newest_model(name) for name in config.policies}
        for model in models.values():
            check_folder(model)
        versions = {name: run.version_of(model) for name, model in models.items()}
    else:
        config = load_run_config(find_recipe(target), overrides or [])
        models = {name: settings.model for name, settings in config.policies.items()}
        versions = dict.fromkeys(models, FIRST_VERSION)
    policy = chosen_policy(config, policy)
    with RunProgress() as progress:
        evaluation = run_async(evaluate_model(config, policy, models, versions, tasks, progress.on_progress))
        progress.on_evaluation(evaluation)
        if evaluation.num_failed:
            progress.console.print(f"  {evaluation.num_failed} episodes failed and are not in the mean")
