"""``agentrl show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console
    from rich.text import Text

    from agentrl.orchestration.run_directory import RunDirectory
    from agentrl.tokens.tokenizer import FastTokenizer
    from agentrl.types.episode import Episode, Node
    from agentrl.types.version import PolicyVersion

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_VERSION_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


@reported
@needs("train")
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
    from agentrl.weights.digests import check_folder

    directory = RunDirectory.open(run)
    directory.config()
    episodes = _read_episodes(directory, kind)
    if names:
        for one in episodes:
            typer.echo(
                f"{one.episode_id:<32} reward {one.reward}  {len(one.turns)} turns  {one.failure or one.stop_reason}"
                f"{_fork_words(one)}"
            )
        return
    chosen = _choose(episodes, episode)
    policies = {agent.policy for agent in chosen.agents}
    models = {policy: directory.newest_model(policy) for policy in sorted(policies)}
    for model in models.values():
        check_folder(model, _TOKENIZER_FILES)
    tokenizers = {policy: FastTokenizer.load(model) for policy, model in models.items()}
    _print_episode(chosen, tokenizers, Console(highlight=False))


def _read_episodes(directory: RunDirectory, kind: str) -> list[Episode]:
    from agentrl.orchestration.run_directory import read_episodes
    from agentrl.types.errors import ConfigError

    file = directory.path / "episodes" / f"{kind}.jsonl"
    directory.check_length(f"episodes/{file.name}")
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


def _print_episode(episode: Episode, tokenizers: Mapping[str, FastTokenizer], console: Console) -> None:
    """Every node in the order in which it came; where several agents act, each says who it is."""
    from rich.text import Text

    writers = sorted(
        {(episode.policy_of(n.agent), s.version) for n in episode.nodes if n.sample for s in n.sample.versions}
    )
    colours = {writer: _VERSION_COLOURS[n % len(_VERSION_COLOURS)] for n, writer in enumerate(writers)}
    text = Text()
    text.append(f"{episode.episode_id}  task {episode.ticket.task.id}\n", "bold")
    if episode.ticket.fork is not None:
        text.append(f"goes on from {episode.ticket.fork.parent}, behind its turn {episode.ticket.fork.turn}\n", "bold")
    for policy, version in writers:
        name = f"{policy} {version}" if len(tokenizers) > 1 else str(version)
        text.append(f"■ sampled by {name}  ", colours[policy, version])
    text.append("□ context, not trained\n\n", "dim")
    is_fork = episode.ticket.fork is not None
    first_own = next((n.index for n in episode.nodes if is_fork and not episode.ticket.is_pinned(n.turn)), None)
    speaking = ""
    newest: dict[str, int] = {}
    for node in episode.nodes:
        if node.agent in newest and node.parent != newest[node.agent]:
            where = "a conversation of its own" if node.parent is None else f"a branch behind node {node.parent}"
            text.append(f"\n\n{where} (node {node.index}):\n", "bold")
        newest[node.agent] = node.index
        if len(episode.agents) > 1 and node.agent != speaking:
            speaking = node.agent
            text.append(f"\n\n{speaking}: ", "bold")
        if node.index == first_own:
            text.append("\n\nits own from here on:\n", "bold")
        policy = episode.policy_of(node.agent)
        _append_node(text, node, policy, tokenizers[policy], colours)
        if node.sample is not None and (said := _said_of(episode, node)):
            text.append(f" [{said}] ", "bold yellow")
    if episode.failure is not None and episode.failure.trace:
        text.append(f"\n\n{episode.failure.trace.rstrip()}", "red")
    outcome = episode.failure or episode.stop_reason
    apart = "".join(f", {agent} {reward}" for agent, reward in episode.agent_rewards.items())
    reward = f"reward {episode.reward}{apart}"
    text.append(f"\n\n{outcome}; {reward}; {len(episode.turns)} turns; {episode.seconds:.2f} s\n", "bold")
    if episode.counts:
        counted = ", ".join(f"{name} {count}" for name, count in sorted(episode.counts.items()) if count)
        text.append(f"programs: {counted}\n", "dim")
    aborted = sum(turn.aborts for turn in episode.turns)
    text.append(
        f"{episode.num_sampled_tokens} of {episode.num_tokens} tokens sampled, {aborted} aborts survived", "dim"
    )
    console.print(text)


def _said_of(episode: Episode, node: Node) -> str:
    """What scorers said of the turn whose reply a node is.

    Example: ``prm 0.41 -> 0.63, teacher -0.12 nats a token``: of the state before the reply, and behind it.
    """
    said = []
    for scorer, scores in episode.turn_scores.items():
        for score in (score for score in scores if score.key.turn == node.turn):
            worth = [f"{number:.2f}" for number in (score.prior, score.value) if number is not None]
            parts = [" -> ".join(worth)] if worth else []
            if score.logprobs is not None:
                parts.append(f"{float(score.logprobs.mean()):.2f} nats a token")
            if score.note:
                parts.append(f"({score.note})")
            said.append(f"{scorer} {' '.join(parts)}")
    return ", ".join(said)


def _fork_words(episode: Episode) -> str:
    fork = episode.ticket.fork
    return "" if fork is None else f"  from {fork.name}"


def _append_node(
    text: Text, node: Node, policy: str, tokenizer: FastTokenizer, colours: Mapping[tuple[str, PolicyVersion], str]
) -> None:
    if node.sample is None:
        text.append(tokenizer.decode(node.token_ids), "dim")
        return
    for span in node.sample.versions:
        text.append(tokenizer.decode(node.token_ids[span.start : span.end]), colours[policy, span.version])
