"""``agentrl replay``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.errors import reported
from agentrl.cli.tables import plain_table, wide_console
from agentrl.process.loop import run_async

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentrl.config.base import ConfigModel
    from agentrl.orchestration.config import RunConfig
    from agentrl.orchestration.replay import Comparison, StepReplay
    from agentrl.orchestration.token_fates import BranchFates, EpisodeFates, TokenRow
    from agentrl.tokens.tokenizer import FastTokenizer

# By the first word of a fate where the whole has no entry.
_COLOURS = {
    "prompt": "dim",
    "kept": "green",
    "clipped: low": "yellow",
    "clipped: high": "magenta",
    "rejected": "red",
    "masked: mismatched": "bright_red",
    "masked": "blue",
    "skipped": "cyan",
    "dropped": "bright_black",
}
_ALWAYS_SHOWN = ("trainer/loss", "trainer/grad_norm", "trainer/clipped_fraction", "trainer/rejected_fraction")
_BAR_CELLS = 40


@reported
def replay(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    step: Annotated[int, typer.Argument(help="Step, as in metrics.jsonl: the version that it made.")],
    episode: Annotated[str | None, typer.Option(help="Show this episode, token by token.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write one line of JSON for every token to this file.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the trainer computes.")] = "cpu",
) -> None:
    """Do the step over one batch again, from the journal, and say what became of every token and why."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.replay import replay_step, write_token_rows
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.tokens.tokenizer import FastTokenizer

    with PhaseProgress() as progress:
        progress.on_phase(f"replaying step {step} of {run}")
        found = run_async(replay_step(run, step, device, episode, progress.on_progress))
    directory = RunDirectory.open(run)
    tokenizer = FastTokenizer.load(directory.newest_model())
    console = wide_console()
    if episode is None:
        _print_step(console, found, directory.config())
    else:
        _print_episode(console, next(e for e in found.episodes if e.name == episode), tokenizer)
    if json is not None:
        console.print(f"\n{write_token_rows(found, tokenizer, json):,} tokens written to {json}", soft_wrap=True)


def _print_step(console: Console, found: StepReplay, config: RunConfig) -> None:
    plan = found.plan
    start = f"checkpoint {plan.checkpoint.name}" if plan.checkpoint else "the policy's first model"
    redone = f", by {len(plan.steps)} steps" if len(plan.steps) > 1 else ""
    console.print(f"\n[bold]step {plan.number}[/bold] from {start}{redone}: {_rules(config)}\n", soft_wrap=True)
    console.print(_fate_table(found))
    console.print()
    console.print(_episode_table(found))
    console.print()
    _print_comparison(console, found)


def _rules(config: RunConfig) -> str:
    """The options that decide about tokens, with the names that a recipe has for them."""
    algorithm = next(iter(config.policies.values())).algorithm
    parts = [f"loss {_options(algorithm.loss)}", f"correction {_options(algorithm.correction)}"]
    if algorithm.minibatches * algorithm.epochs > 1:
        parts.append(f"minibatches={algorithm.minibatches} epochs={algorithm.epochs}, fates of the last epoch")
    return "; ".join([*parts, f"staleness {config.buffer.staleness} max_staleness={config.buffer.max_staleness}"])


def _options(section: ConfigModel) -> str:
    values = section.model_dump()
    return " ".join([values.pop("kind"), *(f"{name}={value}" for name, value in values.items())])


def _fate_table(found: StepReplay) -> Table:
    """Tokens by fate, the most frequent first."""
    counts = found.count()
    total = max(sum(counts.values()), 1)
    table = plain_table("tokens", ">count", ">fraction", "")
    for fate, count in counts.most_common():
        bar = "█" * round(_BAR_CELLS * count / total)
        table.add_row(_coloured(fate), f"{count:,}", f"{count / total:.4f}", bar)
    table.add_row("all", f"{total:,}", "1.0000", "")
    return table


def _episode_table(found: StepReplay) -> Table:
    """Fractions of each episode's sampled tokens by fate."""
    fates = [fate for fate, _ in found.count().most_common() if fate != "prompt"]
    table = plain_table("episode", ">reward", ">advantage", ">sampled", *(f">{fate}" for fate in fates))
    for episode in found.episodes:
        counts = episode.count()
        sampled = sum(count for fate, count in counts.items() if fate != "prompt")
        reward = episode.episode.reward
        table.add_row(
            episode.name,
            "" if reward is None else f"{reward:.3f}",
            "" if episode.advantage is None else f"{episode.advantage:+.3f}",
            f"{sampled:,}",
            *(f"{counts[fate] / sampled:.3f}" if counts[fate] else "" for fate in fates),
        )
    return table


def _print_comparison(console: Console, found: StepReplay) -> None:
    if not found.comparisons:
        console.print("the run recorded nothing to compare this step with: it ended before, or nothing was computed")
        return
    table = plain_table("value", ">recorded", ">replayed", "")
    for c in found.comparisons:
        if c.name in _ALWAYS_SHOWN or not c.is_equal:
            table.add_row(c.name, str(c.recorded), str(c.replayed), _verdict(c))
    console.print(table)
    if found.is_equal:
        console.print(f"\nall {len(found.comparisons)} values equal those that the run recorded, to the last bit")
        return
    reasons = "; ".join(found.differences) or "so it goes with another processor, PyTorch or number of threads"
    console.print(f"\nnot all values equal those that the run recorded: {reasons}", soft_wrap=True)


def _verdict(c: Comparison) -> str:
    if c.is_equal:
        return "equal"
    if isinstance(c.recorded, float) and isinstance(c.replayed, float):
        return f"[red]differs by {abs(c.replayed - c.recorded):.1e}[/red]"
    return "[red]differs[/red]"


def _print_episode(console: Console, episode: EpisodeFates, tokenizer: FastTokenizer) -> None:
    from rich.text import Text

    from agentrl.orchestration.token_fates import token_rows

    text = Text()
    text.append(f"\n{episode.name}  task {episode.episode.ticket.task.id}\n", "bold")
    for fate in episode.count():
        text.append_text(_coloured(f"■ {fate}  ", fate))
    for number, branch in enumerate(episode.branches):
        text.append(f"\n\nbranch {number}\n" if len(episode.branches) > 1 else "\n\n", "bold")
        _append_branch(text, branch, tokenizer)
    advantage = "none" if episode.advantage is None else f"{episode.advantage:+.4f}"
    text.append(f"\n\nreward {episode.episode.reward}; advantage {advantage}\n", "bold")
    console.print(text)
    table = plain_table(
        ">branch", ">position", "token", ">turn", ">version", ">staleness", ">log mu", ">log pi", ">ratio", ">pi/prox",
        ">advantage", ">weight", "fate",
    )  # fmt: skip
    for row in token_rows(episode, tokenizer.decode):
        if row.version is not None:
            table.add_row(*_cells(row))
    console.print(table)


def _append_branch(text: Text, branch: BranchFates, tokenizer: FastTokenizer) -> None:
    """Neighbours of one fate are decoded together: a token may be a part of a letter."""
    pairs = zip(branch.fates, branch.view.trajectory.token_ids.tolist(), strict=True)
    for fate, tokens in groupby(pairs, key=lambda pair: pair[0]):
        text.append_text(_coloured(tokenizer.decode([token for _, token in tokens]), fate))


def _cells(row: TokenRow) -> list[str | Text]:
    from rich.text import Text

    token = Text(repr(row.text)[1:-1])
    numbers = (row.behaviour_logprob, row.trainer_logprob, row.ratio, row.proximal_ratio, row.advantage, row.weight)
    return [
        str(row.branch), str(row.position), token, str(row.turn), str(row.version), str(row.staleness),
        *("" if number is None else f"{number:.4f}" for number in numbers), _coloured(row.fate),
    ]  # fmt: skip


def _coloured(text: str, fate: str | None = None) -> Text:
    from rich.text import Text

    name = fate or text
    return Text(text, _COLOURS.get(name) or _COLOURS[name.partition(":")[0]])
