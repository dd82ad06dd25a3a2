"""Where every dispatched episode and every sampled token ended up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agentrl import codec
from agentrl.telemetry.json_lines import read_lines
from agentrl.types.episode import Episode, Ticket, count_sampled_tokens
from agentrl.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The end of one episode. `outcome` is ``trained`` or ``dropped``; `reason` says why it was dropped.

    Tokens are sampled ones, drawn in this very episode: `trained_tokens` entered a loss, `masked_tokens` were too old,
    `untrained_tokens` are of policies that do not train the episode (frozen, or its group had nothing to teach them).
    Not among them are `regenerated_tokens`, sampled and lost before they came again. `stop` is the stop reason, empty
    where the episode has none; `tool_s` are seconds in the environment's steps. `trained_by` has the step of the
    version that each policy made of it, `step` the last of these. `fork` names the state that the episode went on from,
    empty if it was played from its start; `pinned_tokens` were drawn in its parent, and count there.
    """

    episode_id: str
    task: str
    group: int
    member: int
    attempt: int
    outcome: str
    reason: str
    stop: str
    reward: float | None
    turns: int
    sampled_tokens: int
    trained_tokens: int
    masked_tokens: int
    seconds: float
    tool_s: float
    step: int
    regenerated_tokens: int = 0
    untrained_tokens: int = 0
    environment: str = ""
    trained_by: dict[str, int] = field(default_factory=dict)
    fork: str = ""
    pinned_tokens: int = 0


def read_ledger(file: Path) -> list[LedgerLine]:
    """Lines of a run's ledger; one that a crash cut off is left out.

    Raises:
        ConfigError: there is no such file, or a line was written by a version with other columns.
        StorageError: the file cannot be read, or a line is damaged.
    """
    if not file.is_file():
        raise ConfigError(f"no {file}; `agentrl runs` lists the runs")
    lines = []
    for number, text in enumerate(read_lines(file), start=1):
        try:
            lines.append(codec.from_json(text, LedgerLine))
        except msgspec.ValidationError as error:
            message = f"{file}, line {number}: {error}; another version of agentrl wrote it: read it with that one"
            raise ConfigError(message) from None
    return lines


@dataclass(slots=True)
class Ledger:
    """Counts ends and hands each line to a writer.

    Invariant: every dispatched episode has one line once `write_off` has been called.
    """

    write: Callable[[LedgerLine], None]
    episodes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    _in_flight: dict[str, Ticket] = field(default_factory=dict)

    def dispatched(self, ticket: Ticket) -> None:
        """An episode begins; it will have a line."""
        self._in_flight[ticket.episode_id] = ticket

    @property
    def in_flight(self) -> list[Ticket]:
        """Episodes that have no line yet."""
        return list(self._in_flight.values())

    def write_off(self, reason: str, step: int, played: Mapping[str, Episode]) -> None:
        """Drop every episode that has no line yet; `played` are those of which something is known, by name."""
        for ticket in self.in_flight:
            self.dropped(played.get(ticket.episode_id, Episode(ticket, (), (), ())), reason, step)

    def trained(self, episode: Episode, trained_tokens: int, trained_by: Mapping[str, int]) -> None:
        """The episode is part of these steps' versions of the policies that trained it."""
        sampled = _num_sampled_by(episode, trained_by)
        others = episode.num_sampled_tokens - sampled
        self.tokens["trained"] += trained_tokens
        self.tokens["masked_stale"] += sampled - trained_tokens
        if others:
            self.tokens["untrained"] += others
        tokens = {
            "trained_tokens": trained_tokens,
            "masked_tokens": sampled - trained_tokens,
            "untrained_tokens": others,
            "trained_by": dict(trained_by),
        }
        self._add(episode, "trained", "", max(trained_by.values()), tokens)

    def dropped(self, episode: Episode, reason: str, step: int) -> None:
        """The episode will never be trained."""
        self.tokens[f"dropped_{reason}"] += episode.num_sampled_tokens
        self._add(episode, "dropped", reason, step, {"trained_tokens": 0, "masked_tokens": 0})

    def goodput(self) -> dict[str, float]:
        """Fractions of all sampled tokens by what became of them, under ``goodput/``."""
        total = max(sum(self.tokens.values()), 1)
        return {f"goodput/{name}_fraction": count / total for name, count in sorted(self.tokens.items())}

    def _add(self, episode: Episode, outcome: str, reason: str, step: int, tokens: Mapping[str, Any]) -> None:
        self._in_flight.pop(episode.episode_id, None)
        self.episodes[f"{outcome}_{reason}" if reason else outcome] += 1
        details: dict[str, Any] = {
            "episode_id": episode.episode_id,
            "task": episode.ticket.task.id,
            "group": episode.ticket.group,
            "member": episode.ticket.member,
            "attempt": episode.ticket.attempt,
            "stop": episode.stop_reason or "",
            "reward": episode.reward,
            "turns": len(episode.turns),
            "sampled_tokens": episode.num_sampled_tokens,
            "seconds": round(episode.seconds, 4),
            "tool_s": round(sum(turn.environment_s for turn in episode.turns), 4),
            "regenerated_tokens": sum(turn.regenerated_tokens for turn in episode.turns),
            "environment": episode.ticket.environment,
            "fork": episode.ticket.fork.name if episode.ticket.fork is not None else "",
            "pinned_tokens": episode.num_pinned_tokens,
        }
        if details["regenerated_tokens"]:
            self.tokens["regenerated"] += details["regenerated_tokens"]
        self.write(LedgerLine(outcome=outcome, reason=reason, step=step, **tokens, **details))


def _num_sampled_by(episode: Episode, policies: Collection[str]) -> int:
    """Tokens that some of an episode's policies drew; those of an agent without a policy on record count too."""
    policy_of = {agent.name: agent.policy for agent in episode.agents}
    own = (node for node in episode.nodes if not episode.ticket.is_pinned(node.turn))
    return count_sampled_tokens(node for node in own if policy_of.get(node.agent, "") in {"", *policies})
