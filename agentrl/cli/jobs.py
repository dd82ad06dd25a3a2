"""``agentrl submit`` and ``agentrl jobs``: runs as jobs of a cluster's own system."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.recipes import OverridesArgument, RecipeArgument, find_recipe
from agentrl.cli.tables import endless_console, plain_table
from agentrl.jobs.systems import SystemName

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.jobs.job import Job, JobSystem

jobs = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
_JobArgument = Annotated[str, typer.Argument(help="Job, as `agentrl jobs list` names it, such as slurm:42.")]
_RecipeOption = Annotated[
    Path | None, typer.Option("--recipe", help="Recipe whose table [job] says which cluster is asked.")
]


@jobs.callback()
def main() -> None:
    """List, read and stop the jobs that `agentrl submit` has made."""


@reported
@needs("train")
def submit(
    recipe: RecipeArgument,
    to: Annotated[SystemName, typer.Option("--to", help="The system that runs the job.")],
    overrides: OverridesArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; ask nobody.")] = False,
) -> None:
    """Have a cluster train by a recipe; submitted again, the job goes on with its run."""
    from agentrl.jobs.config import load_job_config
    from agentrl.jobs.submission import build_job, submit_job
    from agentrl.jobs.systems import open_system

    found, given = find_recipe(recipe), overrides or []
    config = load_job_config(found, given)
    system = open_system(to, config)
    spec = build_job(found, given, config, system)
    if dry_run:
        typer.echo(system.render(spec), nl=False)
        return
    job = submit_job(system, spec)
    typer.echo(f"{job.id} is {job.state}; its run is {spec.run_folder}")
    typer.echo(f"agentrl jobs logs {job.id} --follow")


@jobs.command("list")
@reported
def list_jobs(
    on: Annotated[SystemName | None, typer.Option("--on", help="Ask this system only.")] = None,
    recipe: _RecipeOption = None,
) -> None:
    """List our jobs, of all systems that answer or of one."""
    from agentrl.types.errors import JobError

    found: list[Job] = []
    silent: dict[SystemName, str] = {}
    asked = [on] if on else list(SystemName)
    for name in asked:
        try:
            found += _opened(name, recipe).jobs()
        except JobError as error:
            silent[name] = str(error)
    if len(silent) == len(asked):
        raise JobError("; ".join(f"{name}: {said}" for name, said in silent.items()))
    if found:
        endless_console().print(_table(found))
    else:
        typer.echo(f"no jobs of ours on {', '.join(name for name in asked if name not in silent)}")
    for name, said in silent.items():
        typer.echo(f"{name} does not answer: {said.partition(': ')[0]}; --on {name} says what to do")


@jobs.command()
@reported
def logs(
    job: _JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    recipe: _RecipeOption = None,
) -> None:
    """Print what a job has written."""
    system, found = _found(job, recipe)
    for piece in system.logs(found.number, follow):
        typer.echo(piece, nl=False)


@jobs.command()
@reported
def stop(job: _JobArgument, recipe: _RecipeOption = None) -> None:
    """Have a job park its episodes and checkpoint, and end; submitted again, it goes on."""
    from agentrl.types.errors import JobError

    system, found = _found(job, recipe)
    if found.state.is_over:
        raise JobError(f"{found.id} is over: it is {found.state}; nothing is left to stop")
    system.stop(found.number)
    typer.echo(f"{found.id} was told to stop; it parks and checkpoints, and `agentrl jobs list` shows when it has")


def _opened(name: SystemName, recipe: Path | None) -> JobSystem:
    from agentrl.jobs.config import JobConfig, load_job_config
    from agentrl.jobs.systems import open_system

    return open_system(name, load_job_config(find_recipe(recipe), []) if recipe else JobConfig())


def _found(job: str, recipe: Path | None) -> tuple[JobSystem, Job]:
    """A job and its system. Raises JobError if it is not there, or not ours."""
    from agentrl.types.errors import JobError

    name, _, number = job.partition(":")
    if name not in set(SystemName) or not number:
        raise JobError(f"'{job}' names no job: give one as `agentrl jobs list` does, such as ray:NAME or slurm:42")
    system = _opened(SystemName(name), recipe)
    return system, system.find(number)


def _table(found: list[Job]) -> Table:
    table = plain_table("job", "state", "submitted", "run folder", "")
    for job in found:
        when = datetime.fromtimestamp(job.submitted_s).strftime("%Y-%m-%d %H:%M") if job.submitted_s else ""
        table.add_row(job.id, str(job.state), when, str(job.mark.run_folder), job.message)
    return table
