"""``agentrl runs``: a folder of runs, and what became of one run's episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.tables import plain_table, wide_console

if TYPE_CHECKING:
    from rich.table import Table

    from agentrl.buffer.ledger import LedgerLine
    from agentrl.buffer.reports import BiasReport
    from agentrl.orchestration.run_directory import RunDirectory

_NOTHING_CLOSED = "nothing to compare yet: no episode of a closed group has been trained"
_RUNS = Path("runs")
_OUTCOMES = ("trained", "dropped")
_SUMS = ("episodes", "sampled", "trained", "masked")
_RunArgument = Annotated[Path, typer.Argument(help="Run folder.")]


class _FolderOrCommand(TyperGroup):
    """Reads a first word that is no command as the folder to list: `agentrl runs FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_known = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_known else ["list", *args])


runs = typer.Typer(cls=_FolderOrCommand, rich_markup_mode=None)


@runs.callback()
def main() -> None:
    """List runs, or tell what became of a run's episodes; a folder alone lists its runs."""


@runs.command("list")
@reported
def list_runs(folder: Annotated[Path, typer.Argument(help="Folder of run folders.")] = _RUNS) -> None:
    """List runs with their status, version and newest held-out reward."""
    from rich.console import Console
    from rich.table import Table

    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.types.errors import ConfigError, StorageError

    if folder != _RUNS and not folder.is_dir():
        raise ConfigError(f"no folder {folder}; give the one in which `agentrl train` makes run folders")
    table = Table("run", "status", "version", "held-out", "", box=None)
    damages = []
    for path in sorted({path.parent for name in ("config.json", "state.json") for path in folder.glob(f"*/{name}")}):
        try:
            table.add_row(path.name, *_standing(RunDirectory.open(path)))
        except (ConfigError, StorageError) as error:
            table.add_row(path.name, "damaged", "", "", "")
            damages.append(str(error))
    if not table.row_count:
        typer.echo(f"no runs in {folder}; `agentrl train RECIPE` makes one")
        return
    Console().print(table)
    if damages:
        raise StorageError("\n".join(damages))


@runs.command("check")
@reported
@needs("train")
def check(run: _RunArgument) -> None:
    """Read every file of a run and name those that are damaged or missing."""
    from agentrl.orchestration.run_check import find_damage
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.types.errors import StorageError

    damages = find_damage(RunDirectory(run.absolute()))
    if damages:
        raise StorageError("\n".join(damages))
    typer.echo(f"every file of {run} is as it was written")


@runs.command("trace")
@reported
def trace(run: _RunArgument) -> None:
    """Write the spans of a run as one trace for https://ui.perfetto.dev, also while it goes on or after a kill."""
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.telemetry.trace_events import TRACE, write_trace
    from agentrl.types.errors import ConfigError, StorageError

    folder = RunDirectory.open(run).path
    try:
        size = write_trace(folder)
    except OSError as error:
        raise StorageError(f"{folder / TRACE} cannot be written: {error}; free space") from error
    if size is None:
        raise ConfigError(f"{folder} has no spans; set telemetry.trace_episodes above 0 for the next run")
    cut_off = f", {size.open_episodes:,} of them without an end" if size.open_episodes else ""
    typer.echo(f"{folder / TRACE}: {size.episodes:,} episodes{cut_off}, {size.spans:,} spans")


@runs.command("ledger")
@reported
def show_ledger(
    run: _RunArgument,
    outcome: Annotated[str | None, typer.Option(help="Only trained or dropped episodes.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only episodes dropped for this reason.")] = None,
    last: Annotated[int, typer.Option(min=0, help="Episodes to show, the last that ended; 0 shows all.")] = 20,
) -> None:
    """Show where every dispatched episode ended up, and sums by outcome."""
    from agentrl.types.errors import ConfigError

    lines = _read(run)
    if outcome not in (None, *_OUTCOMES):
        raise ConfigError(f"no outcome '{outcome}'; there are {' and '.join(_OUTCOMES)}")
    chosen = [line for line in lines if outcome in (None, line.outcome) and reason in (None, line.reason)]
    console = wide_console()
    table = plain_table("episode", "outcome", "stop", ">reward", ">turns", ">sampled", ">trained", ">masked",
                        ">seconds", ">tool s", ">step")  # fmt: skip
    for line in chosen[-last:]:
        table.add_row(
            line.episode_id, _end(line), line.stop, "" if line.reward is None else f"{line.reward:.3f}",
            f"{line.turns:,}", f"{line.sampled_tokens:,}", f"{line.trained_tokens:,}", f"{line.masked_tokens:,}",
            f"{line.seconds:.2f}", f"{line.tool_s:.2f}", str(line.step),
        )  # fmt: skip
    console.print(table)
    console.print(f"\n{table.row_count:,} of {len(chosen):,} episodes shown; all {len(chosen):,}:")
    console.print(_summary(chosen))


@runs.command("goodput")
@reported
def show_goodput(run: _RunArgument) -> None:
    """Show what became of every sampled token."""
    from agentrl.buffer.reports import goodput

    lines = _read(run)
    total = sum(line.sampled_tokens + line.regenerated_tokens for line in lines)
    table = plain_table("tokens", ">count", ">fraction", "")
    for name, fraction in goodput(lines).items():
        table.add_row(
            name.replace("_", ": ", 1), f"{round(fraction * total):,}", f"{fraction:.4f}", "█" * round(40 * fraction)
        )
    table.add_row("sampled", f"{total:,}", "1.0000", "")
    wide_console().print(table)


@runs.command("bias")
@reported
def show_bias(run: _RunArgument) -> None:
    """Compare the trained episodes with all that were dispatched: a ratio of 1 and a distance of 0 are no bias."""
    from agentrl.buffer.reports import bias

    lines = _read(run)
    reports = bias(lines)
    console = wide_console()
    dispatched = sum(report.num_dispatched for report in reports)
    console.print(
        f"{sum(report.num_trained for report in reports):,} of {dispatched:,} episodes trained; "
        f"{len(lines) - dispatched:,} more are left out, whose groups are not before the first one that is still open\n"
    )
    for report in reports:
        if len(reports) > 1:
            console.print(f"{report.environment}: {report.num_trained:,} of {report.num_dispatched:,} episodes trained")
        console.print(_comparisons(report) if report.comparisons else _NOTHING_CLOSED)
        if report is not reports[-1]:
            console.print()
    if not reports:
        console.print(_NOTHING_CLOSED)


def _standing(run: RunDirectory) -> tuple[str, str, str, str]:
    """Status, version, newest held-out reward and message of a run. Raises StorageError."""
    state = run.state()
    versions = state.versions if state else {}
    is_one = len(versions) < 2
    prefixes = {"": ""} if is_one else {policy: f"{policy}/" for policy in versions}
    found = {policy: run.last_metric(f"{prefix}eval/reward_mean") for policy, prefix in prefixes.items()}
    heldout = _of_each({policy: f"{mean:.3f}" for policy, mean in found.items() if mean is not None}, is_one)
    return run.status_now(), _of_each(versions, is_one), heldout, state.message[:80] if state else ""


def _comparisons(report: BiasReport) -> Table:
    table = plain_table("measure", ">dispatched", ">trained", ">ratio", ">95 % interval", ">KS distance")
    for c in report.comparisons:
        ratio = (f"{c.ratio:.3f}", f"{c.ratio_low:.3f} to {c.ratio_high:.3f}") if not math.isnan(c.ratio) else ("", "")
        table.add_row(c.measure, _number(c.dispatched_mean), _number(c.trained_mean), *ratio, f"{c.ks:.3f}")
    return table


def _of_each(values: Mapping[str, object], is_one: bool) -> str:
    """The value of each policy with its name, which goes without saying where there is one alone."""
    return ", ".join(str(value) if is_one else f"{policy} {value}" for policy, value in values.items())


def _read(run: Path) -> list[LedgerLine]:
    from agentrl.buffer.ledger import read_ledger
    from agentrl.orchestration.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    directory.check_length(directory.ledger.name)
    return read_ledger(directory.ledger)


def _summary(lines: Sequence[LedgerLine]) -> Table:
    """Episodes and tokens by outcome and reason, the most frequent first."""
    from collections import Counter

    sums: dict[str, Counter[str]] = {}
    for line in lines:
        counts = {"sampled": line.sampled_tokens, "trained": line.trained_tokens, "masked": line.masked_tokens}
        sums.setdefault(_end(line), Counter()).update(episodes=1, **counts)
    table = plain_table("outcome", *(f">{name}" for name in _SUMS))
    for end, of_end in sorted(sums.items(), key=lambda item: -item[1]["episodes"]):
        table.add_row(end, *(f"{of_end[name]:,}" for name in _SUMS))
    return table


def _end(line: LedgerLine) -> str:
    return f"{line.outcome}: {line.reason}" if line.reason else line.outcome


def _number(value: float) -> str:
    return f"{value:,.4f}" if abs(value) < 1 else f"{value:,.2f}"
