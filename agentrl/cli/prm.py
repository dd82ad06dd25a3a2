"""``agentrl prm``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.recipes import find_recipe
from agentrl.process.loop import run_async

if TYPE_CHECKING:
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.config import RunConfig
    from agentrl.orchestration.prm_training import PrmReport
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.types.episode import Episode

prm = typer.Typer(help="Process-reward models.", no_args_is_help=True, rich_markup_mode=None)


@prm.callback()
def main() -> None:
    """Process-reward models."""


@prm.command("train")
@reported
@needs("train")
def train(
    sources: Annotated[
        list[str],
        typer.Argument(help="Run folders whose episodes are taken, or a recipe with key.path=value behind it."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the model.")],
    episodes: Annotated[int, typer.Option(min=2, help="Newest of each run, or played by the recipe's policy.")] = 1024,
    labels: Annotated[
        str, typer.Option(help="outcome, or an expert's function of a ScoredTurn as module:attribute.")
    ] = "outcome",
    policy: Annotated[str | None, typer.Option(help="Whose turns; not needed where one policy is trained.")] = None,
    base: Annotated[Path | None, typer.Option(help="Model folder that it starts from; default: the policy's.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a model that runs may be using.")] = False,
    passes: Annotated[int, typer.Option(min=1, help="Over all episodes; the best one counts.")] = 3,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="At its highest; a hundredth for a large model.")
    ] = 3e-3,
    threads: Annotated[int, typer.Option(min=1, help="Processor cores.")] = 2,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where it is fitted.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the order of episodes.")] = 0,
) -> None:
    """Fit a process-reward model to the turns of runs, or of episodes that a recipe's policy plays first."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.config import chosen_policy
    from agentrl.orchestration.prm_training import PrmTraining, labeller
    from agentrl.trainer.reward_fit import FitOptions

    config, runs = _read(sources)
    policy = chosen_policy(config, policy)
    body = base or (runs[-1].newest_model(policy) if runs else config.policies[policy].model)
    training = PrmTraining(output, body, policy, labeller(labels, policy), replace)
    options = FitOptions(passes, learning_rate=learning_rate, threads=threads, device=device, seed=seed)
    with PhaseProgress() as progress:
        found = _episodes(config, runs, policy, episodes, progress)
        report = run_async(training.fit(found, options, progress))
        print_report(report, output, progress)


def _read(sources: list[str]) -> tuple[RunConfig, list[RunDirectory]]:
    """The configuration, and the runs if these are run folders. Raises ConfigError."""
    from agentrl.orchestration.config import load_run_config
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.types.errors import ConfigError

    if not Path(sources[0]).is_dir():
        return load_run_config(find_recipe(Path(sources[0])), sources[1:]), []
    overrides = [source for source in sources if "=" in source and not Path(source).exists()]
    if overrides:
        raise ConfigError(f"{overrides[0]}: a run folder has its configuration; give a recipe to override it")
    runs = [RunDirectory.open(Path(source)) for source in sources]
    return runs[-1].config(), runs


def _episodes(
    config: RunConfig, runs: list[RunDirectory], policy: str, count: int, progress: PhaseProgress
) -> list[Episode]:
    from agentrl.orchestration.prm_training import played_episodes, recorded_episodes

    if not runs:
        return run_async(played_episodes(config, policy, count, progress))
    progress.on_phase(f"reading episodes of {len(runs)} runs")
    return [episode for run in runs for episode in recorded_episodes(run, count)]


def print_report(report: PrmReport, output: Path, progress: PhaseProgress) -> None:
    """What a fit made, and how good it is on tasks that it has not seen."""
    quality = report.quality
    left_out = "".join(f", {count} {reason} left out" for reason, count in sorted(report.left_out.items()))
    progress.console.print(
        f"[green]{output}[/green]: version {report.version.name}, {report.states:,} states of {report.episodes:,} "
        f"episodes{left_out}, {progress.seconds:.0f} s",
        soft_wrap=True,
    )
    progress.console.print(
        f"{quality.states:,} states of unseen tasks: correlation {quality.correlation:.3f}, AUC {quality.auc:.3f}, "
        f"error {quality.error:.4f} of a variance of {quality.variance:.4f}",
        soft_wrap=True,
    )
