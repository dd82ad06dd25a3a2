"""``agentrl rescore``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.process.loop import run_async


@reported
@needs("train")
def rescore(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    scorer: Annotated[
        str,
        typer.Option(
            help='Name of one of the run\'s scorers, or a table: {kind = "prm", name = "prm", model = "..."}.'
        ),
    ],
) -> None:
    """Have the turns of a run scored again, without generating; scores that are there are not asked for twice."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.rescoring import rescore as score_again
    from agentrl.orchestration.rescoring import scorer_config
    from agentrl.orchestration.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    config = scorer_config(directory, scorer)
    with PhaseProgress() as progress:
        progress.on_phase(f"scoring by {config.name}")
        found = run_async(score_again(directory, config, progress.on_progress))
        progress.console.print(
            f"[green]{found.file}[/green]: {found.scored:,} turns scored, {found.known:,} known, {found.failed:,} "
            f"failed, of {found.episodes:,} episodes, {progress.seconds:.0f} s",
            soft_wrap=True,
        )
        if found.correlation is not None:
            progress.console.print(f"correlation of mean value and reward: {found.correlation:.3f}")
        if found.failure:
            progress.console.print(f"[red]first failure:[/red] {found.failure}", soft_wrap=True)
