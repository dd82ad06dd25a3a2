"""``agentrl replay``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.cli.tables import plain_table, wide_console
from agentrl.process.loop import run_async

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from agentrl.cli.progress import PhaseProgress
    from agentrl.config.base import ConfigModel
    from agentrl.orchestration.config import RunConfig
    from agentrl.orchestration.step_replay import Comparison, StepReplay
    from agentrl.orchestration.token_status import ExplainedBranch, ExplainedEpisode, TokenRow
    from agentrl.tokens.tokenizer import FastTokenizer

# By the first word of a status where the whole has no entry.
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
@needs("train")
def replay(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    step: Annotated[int, typer.Argument(help="Step, as in metrics.jsonl: the version that it made.")],
    episode: Annotated[str | None, typer.Option(help="Show this episode, token by token.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write one line of JSON for every token to this file.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the trainer computes.")] = "cpu",
    policy: Annotated[str | None, typer.Option(help="Whose step; not needed where one policy is trained.")] = None,
) -> None:
    """Do the step over one batch again, from the journal, and say what became of every token and why."""
    from agentrl.cli.progress import PhaseProgress
    from agentrl.orchestration.config import chosen_policy
    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.orchestration.step_replay import replay_step, write_token_rows
    from agentrl.tokens.tokenizer import FastTokenizer

    with PhaseProgress() as progress:
        found = run_async(replay_step(run, step, device, episode, policy, _progress(progress, run, step)))
    directory = RunDirectory.open(run)
    policy = chosen_policy(directory.config(), policy)
    tokenizer = FastTokenizer.load(directory.newest_model(policy))
    console = wide_console()
    if episode is None:
        _print_step(console, found, directory.config(), policy)
    else:
        _print_episode(console, next(e for e in found.episodes if e.name == episode), tokenizer)
    if json is not None:
        console.print(f"\n{write_token_rows(found, tokenizer, json):,} tokens written to {json}", soft_wrap=True)


def _progress(progress: PhaseProgress, run: Path, step: int) -> Callable[[int, int, str], None]:
    """Says what is done once something is: a step that cannot be replayed is told alone."""

    def on_progress(done: int, total: int, text: str) -> None:
        if not done:
            progress.on_phase(f"replaying step {step} of {run}")
        progress.on_progress(done, total, text)

    return on_progress


def _print_step(console: Console, found: StepReplay, config: RunConfig, policy: str) -> None:
    plan = found.plan
    start = f"checkpoint {plan.checkpoint.name}" if plan.checkpoint else "the policy's first model"
    redone = f", by {len(plan.steps)} steps" if len(plan.steps) > 1 else ""
    console.print(f"\n[bold]step {plan.number}[/bold] from {start}{redone}: {_rules(config, policy)}\n", soft_wrap=True)
    console.print(_status_table(found))
    console.print()
    console.print(_episode_table(found))
    console.print()
    _print_comparison(console, found)


def _rules(config: RunConfig, policy: str) -> str:
    """The options that decide about tokens, with the names that a recipe has for them."""
    algorithm, buffer = config.policies[policy].algorithm, config.buffer_of(policy)
    parts = [f"loss {_options(algorithm.loss)}", f"correction {_options(algorithm.correction)}"]
    if algorithm.credit.kind != "outcome":
        parts.insert(0, f"credit {_options(algorithm.credit)}")
    if algorithm.minibatches * algorithm.epochs > 1:
        parts.append(f"minibatches={algorithm.minibatches} epochs={algorithm.epochs}, statuses of the last epoch")
    return "; ".join([*parts, f"staleness {buffer.staleness} max_staleness={buffer.max_staleness}"])


def _options(section: ConfigModel) -> str:
    values = section.model_dump()
    return " ".join([values.pop("kind"), *(f"{name}={value}" for name, value in values.items())])


def _status_table(found: StepReplay) -> Table:
    """Tokens by status, the most frequent first."""
    counts = found.count()
    total = max(sum(counts.values()), 1)
    table = plain_table("tokens", ">count", ">fraction", "")
    for status, count in counts.most_common():
        bar = "█" * round(_BAR_CELLS * count / total)
        table.add_row(_coloured(status), f"{count:,}", f"{count / total:.4f}", bar)
    table.add_row("all", f"{total:,}", "1.0000", "")
    return table


def _episode_table(found: StepReplay) -> Table:
    """Fractions of each episode's sampled tokens by status."""
    statuses = [status for status, _ in found.count().most_common() if status != "prompt"]
    table = plain_table("episode", ">reward", ">advantage", ">sampled", *(f">{status}" for status in statuses))
    for episode in found.episodes:
        counts = episode.count()
        sampled = sum(count for status, count in counts.items() if status != "prompt")
        table.add_row(
            episode.name,
            _by_agent(episode.rewards, ".3f"),
            _by_agent(episode.advantages, "+.3f"),
            f"{sampled:,}",
            *(f"{counts[status] / sampled:.3f}" if counts[status] else "" for status in statuses),
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


def _print_episode(console: Console, episode: ExplainedEpisode, tokenizer: FastTokenizer) -> None:
    from rich.text import Text

    from agentrl.orchestration.token_status import token_rows

    text = Text()
    text.append(f"\n{episode.name}  task {episode.episode.ticket.task.id}\n", "bold")
    for status in episode.count():
        text.append_text(_coloured(f"■ {status}  ", status))
    for number, branch in enumerate(episode.branches):
        of_agent = f" of {branch.view.trajectory.agent}" if len(episode.rewards) > 1 else ""
        text.append(f"\n\nbranch {number}{of_agent}\n" if len(episode.branches) > 1 else "\n\n", "bold")
        _append_branch(text, branch, tokenizer)
    reward, advantage = _by_agent(episode.rewards, "") or "none", _by_agent(episode.advantages, "+.4f") or "none"
    text.append(f"\n\nreward {reward}; advantage {advantage}\n", "bold")
    console.print(text)
    table = plain_table(
        ">branch", ">position", "token", ">turn", ">version", ">staleness", ">log mu", ">log pi", ">ratio", ">pi/prox",
        ">advantage", ">weight", "status",
    )  # fmt: skip
    for row in token_rows(episode, tokenizer.decode):
        if row.version is not None:
            table.add_row(*_cells(row))
    console.print(table)


def _by_agent(numbers: Mapping[str, float], form: str) -> str:
    """The number alone where the policy has one agent, else that of each."""
    if len(numbers) == 1:
        return f"{next(iter(numbers.values())):{form}}"
    return ", ".join(f"{agent} {number:{form}}" for agent, number in numbers.items())


def _append_branch(text: Text, branch: ExplainedBranch, tokenizer: FastTokenizer) -> None:
    """Neighbours of one status are decoded together: a token may be a part of a letter."""
    pairs = zip(branch.statuses, branch.view.trajectory.token_ids.tolist(), strict=True)
    for status, tokens in groupby(pairs, key=lambda pair: pair[0]):
        text.append_text(_coloured(tokenizer.decode([token for _, token in tokens]), status))


def _cells(row: TokenRow) -> list[str | Text]:
    from rich.text import Text

    token = Text(repr(row.text)[1:-1])
    numbers = (row.behaviour_logprob, row.trainer_logprob, row.ratio, row.proximal_ratio, row.advantage, row.weight)
    return [
        str(row.branch), str(row.position), token, str(row.turn), str(row.version), str(row.staleness),
        *("" if number is None else f"{number:.4f}" for number in numbers), _coloured(row.status),
    ]  # fmt: skip


def _coloured(text: str, status: str | None = None) -> Text:
    from rich.text import Text

    name = status or text
    return Text(text, _COLOURS.get(name) or _COLOURS[name.partition(":")[0]])
