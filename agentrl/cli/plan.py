"""``agentrl plan``: how fast a recipe's run will be, what holds it up, and how to share out GPUs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.recipes import OverridesArgument, RecipeArgument, find_recipe
from agentrl.cli.tables import plain_table, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.sizing.latencies import Latencies
    from agentrl.sizing.planning import Plan, Split

_MOST_SPLITS = 12


@reported
def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Run folder to measure latencies in; several tell more, see the README."),
    ] = None,
    latencies: Annotated[Path | None, typer.Option(help="TOML file of latencies, laid over those of --from.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key.path=value of a latency, such as environment.slots=16; laid over all else."),
    ] = None,
    rough: Annotated[bool, typer.Option("--rough", help="Take rough defaults for all that nothing else says.")] = False,
    gpus: Annotated[int | None, typer.Option(help="GPUs to share out between engines and trainer.")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy to plan for, where the recipe trains several.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulated episodes.")] = 0,
) -> None:
    """Simulate a recipe's run by measured latencies: bottleneck, staleness, steps an hour, split of GPUs."""
    from agentrl.orchestration.config import chosen_policy, load_run_config
    from agentrl.sizing.config import load_latencies, rough_latencies
    from agentrl.sizing.measure import measure
    from agentrl.sizing.planning import check_gpus, make_plan
    from agentrl.sizing.setup import setup_of
    from agentrl.types.errors import ConfigError

    config = load_run_config(find_recipe(recipe), overrides or [])
    if not (runs or latencies or settings or rough):
        raise ConfigError(
            "nothing says how fast the parts of the run are: give --from RUN to measure them in a run, --latencies "
            "FILE with what you know, or --rough for rough defaults"
        )
    setup = setup_of(config, chosen_policy(config, policy))
    if gpus is not None:
        check_gpus(setup, gpus)
    known = measure(runs, policy, rough_latencies()) if runs else rough_latencies()
    known = load_latencies(latencies, settings or [], known)
    _show(make_plan(setup, known, gpus, seed), known)


def _show(made: Plan, known: Latencies) -> None:
    console = wide_console()
    console.print(_sources(known))
    console.print()
    console.print(_figures(made))
    console.print()
    console.print(_parts(made))
    gain = made.gains[made.bottleneck]
    console.print(f"\nbottleneck: {made.bottleneck} (20 % faster, and the run is {100 * gain:.0f} % faster)")
    if made.splits:
        console.print()
        console.print(_splits(made.splits))
        best = made.splits[0]
        console.print(f"\nbest split of {best.gpus} GPUs: {_words(best)}")


def _sources(known: Latencies) -> Table:
    table = plain_table("latency", ">value", "unit", "from")
    for name, figure in known.table():
        value = "no bound" if math.isinf(figure.value) else f"{figure.value:,.4g}"
        table.add_row(name, value, figure.unit, figure.source)
    return table


def _figures(made: Plan) -> Table:
    outcome, setup = made.outcome, made.setup
    table = plain_table("of the run", ">expected", "")
    table.add_row("steps an hour", f"{outcome.steps_per_hour:,.1f}", f"{outcome.step_s:,.2f} s a step")
    table.add_row("all steps", f"{setup.steps * outcome.step_s / 3600:,.2f} h", f"{setup.steps:,} steps")
    table.add_row("trained tokens", f"{outcome.trained_tokens_per_s:,.0f}", "tokens/s")
    table.add_row("trained", f"{100 * outcome.trained_fraction:.1f} %", "of the sampled tokens of trained episodes")
    table.add_row("staleness", f"{outcome.staleness_mean:.2f}", f"steps, mean; p90 {outcome.staleness_p90}")
    table.add_row("trainer waits", f"{outcome.wait_s:,.2f} s", "of a step, for episodes")
    table.add_row("episodes in play", f"{outcome.running:,.1f}", f"of {setup.places:,} places")
    return table


def _parts(made: Plan) -> Table:
    table = plain_table("part", ">busy", ">run, if it were 20 % faster")
    for part in sorted(made.gains, key=lambda name: -made.gains[name]):
        table.add_row(part, f"{100 * made.outcome.busy[part]:.0f} %", f"{100 * made.gains[part]:+.1f} %")
    for name, gain in made.changes.items():
        table.add_row(f"{name}, 20 % more" if name == "rollout.concurrency" else name, "", f"{100 * gain:+.1f} %")
    return table


def _splits(splits: tuple[Split, ...]) -> Table:
    table = plain_table(">engines", ">trainer ranks", ">steps an hour", ">staleness", ">engines busy", ">trainer busy")
    for split in splits[:_MOST_SPLITS]:
        outcome = split.outcome
        table.add_row(
            str(split.engines), str(split.ranks), f"{outcome.steps_per_hour:,.1f}", f"{outcome.staleness_mean:.2f}",
            f"{100 * outcome.busy['engines']:.0f} %", f"{100 * outcome.busy['trainer']:.0f} %",
        )  # fmt: skip
    return table


def _words(split: Split) -> str:
    engines, ranks = (f"{n} {name}{'s' * (n > 1)}" for n, name in ((split.engines, "engine"), (split.ranks, "rank")))
    return f"{engines}, {ranks} of the trainer"
