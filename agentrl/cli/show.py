"""``agentrl show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.errors import reported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console
    from rich.text import Text

    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.tokens.tokenizer import FastTokenizer
    from agentrl.types.episode import Episode, Node
    from agentrl.types.version import PolicyVersion

_VERSION_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


@reported
def show(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    episode: Annotated[str | None, typer.Argument(help="Name of an episode; default: the newest.")] = None,
    kind: Annotated[str, typer.Option(help="train, heldout or failed.")] = "train",
    names: Annotated[bool, typer.Option("--names", help="List the names of the episodes that are kept.")] = False,
) -> None:
    """Show an episode as a person reads it: context dim, sampled tokens coloured by policy version."""
    from rich.console import Console

    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.tokens.tokenizer import FastTokenizer

    directory = RunDirectory.open(run)
    episodes = _read_episodes(directory, kind)
    if names:
        for one in episodes:
            typer.echo(
                f"{one.episode_id:<32} reward {one.reward}  {len(one.turns)} turns  {one.failure or one.stop_reason}"
            )
        return
    chosen = _choose(episodes, episode)
    _print_episode(chosen, FastTokenizer.load(directory.newest_model()), Console(highlight=False))


def _read_episodes(directory: RunDirectory, kind: str) -> list[Episode]:
    from agentrl.orchestration.run_directory import read_episodes
    from agentrl.types.errors import ConfigError

    file = directory.path / "episodes" / f"{kind}.jsonl"
    if not file.is_file():
        raise ConfigError(f"no {file}; kinds are train, heldout and failed")
    episodes = read_episodes(file)
    if not episodes:
        raise ConfigError(f"{file} holds no episode")
    return episodes


def _choose(episodes: list[Episode], name: str | None) -> Episode:
    from agentrl.types.errors import ConfigError

    found = [episode for episode in episodes if name in (None, episode.episode_id)]
    if not found:
        raise ConfigError(f"no episode '{name}' is kept; --names lists those that are")
    return found[-1]


def _print_episode(episode: Episode, tokenizer: FastTokenizer, console: Console) -> None:
    from rich.text import Text

    versions = sorted({s.version for node in episode.nodes if node.sample for s in node.sample.versions})
    colours = {version: _VERSION_COLOURS[n % len(_VERSION_COLOURS)] for n, version in enumerate(versions)}
    text = Text()
    text.append(f"{episode.episode_id}  task {episode.ticket.task.id}\n", "bold")
    for version in versions:
        text.append(f"■ sampled by {version}  ", colours[version])
    text.append("□ context, not trained\n\n", "dim")
    for node in episode.nodes:
        _append_node(text, node, tokenizer, colours)
    outcome = episode.failure or episode.stop_reason
    text.append(
        f"\n\n{outcome}; reward {episode.reward}; {len(episode.turns)} turns; {episode.seconds:.2f} s\n", "bold"
    )
    aborted = sum(turn.aborts for turn in episode.turns)
    text.append(
        f"{episode.num_sampled_tokens} of {episode.num_tokens} tokens sampled, {aborted} aborts survived", "dim"
    )
    console.print(text)


def _append_node(text: Text, node: Node, tokenizer: FastTokenizer, colours: Mapping[PolicyVersion, str]) -> None:
    if node.sample is None:
        text.append(tokenizer.decode(node.token_ids), "dim")
        return
    for span in node.sample.versions:
        text.append(tokenizer.decode(node.token_ids[span.start : span.end]), colours[span.version])
