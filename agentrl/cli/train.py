"""``agentrl train`` and ``agentrl resume``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.recipes import OverridesArgument, RecipeArgument, find_recipe
from agentrl.process.loop import run_async
from agentrl.process.stopping import STOPPED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from agentrl.orchestration.recorder import RunObserver
    from agentrl.orchestration.run_end import ArchiveCompleted
    from agentrl.orchestration.shutdown import RunSummary


@reported
@needs("train")
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run's folder if it is there: for jobs that are retried.")
    ] = False,
) -> None:
    """Train by a recipe, into a new run folder."""
    from agentrl.orchestration.config import load_run_config
    from agentrl.orchestration.launch import start_or_resume_run, start_run

    config = load_run_config(find_recipe(recipe), overrides or [])
    launch = start_or_resume_run if resume else start_run
    _run(lambda observer: launch(config, observer))


@reported
@needs("train")
def resume(
    run: Annotated[Path, typer.Argument(help="Run folder, as `agentrl runs` lists it.")],
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Go on without the damaged or missing parts of journal and ledger.")
    ] = False,
) -> None:
    """Go on with a stopped, killed or failed run, episodes in flight included."""
    from agentrl.orchestration.launch import resume_run

    _run(lambda observer: resume_run(run, observer, salvage))


def _run(launch: Callable[[RunObserver], Coroutine[Any, Any, RunSummary | ArchiveCompleted]]) -> None:
    from agentrl.cli.progress import RunProgress, print_summary
    from agentrl.orchestration.run_end import ArchiveCompleted
    from agentrl.types.errors import AgentRLError, RunStoppedError, place_of

    try:
        with RunProgress() as progress:
            summary: RunSummary | ArchiveCompleted = run_async(launch(progress))
    except RunStoppedError as stopped:
        typer.echo(str(stopped))
        raise typer.Exit(STOPPED) from None
    except SystemExit as end:
        # Of an episode's own code the episode has failed: this came from a task that a plugin started beside it.
        raise AgentRLError(f"a plugin has ended the run by sys.exit({end.code}){place_of(end)}; mend that") from end
    if isinstance(summary, ArchiveCompleted) and not summary.episodes:
        typer.echo(f"{summary.run} is finished at version {summary.version}; nothing is left to do")
        return
    if isinstance(summary, ArchiveCompleted):
        typer.echo(
            f"{summary.run} had made all its steps: {summary.episodes} episodes of its ledger were missing in the "
            f"archive and are there now; finished at version {summary.version}"
        )
        return
    print_summary(summary, progress.seconds)
    if summary.status == "stopped":
        typer.echo(f"stopped before its last step; go on with: agentrl resume {summary.run}")
        raise typer.Exit(STOPPED)
