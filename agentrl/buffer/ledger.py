"""Where every dispatched episode and every sampled token ended up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agentrl import codec
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The end of one episode. `outcome` is ``trained`` or ``dropped``; `reason` says why it was dropped.

    Tokens are sampled ones: `trained_tokens` entered a loss, `masked_tokens` were too old. Not among them are
    `regenerated_tokens`, sampled and lost before they came again. `stop` is the stop reason, empty where the episode
    has none; `tool_s` are seconds in the environment's steps.
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


def read_ledger(file: Path) -> list[LedgerLine]:
    """Lines of a run's ledger; one that a crash cut off is left out.

    Raises:
        ConfigError: there is no such file, or a line was written by a version with other columns.
    """
    if not file.is_file():
        raise ConfigError(f"no {file}; `agentrl runs` lists the runs")
    lines = []
    for number, text in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            lines.append(codec.from_json(text, LedgerLine))
        except msgspec.ValidationError as error:
            message = f"{file}, line {number}: {error}; another version of agentrl wrote it: read it with that one"
            raise ConfigError(message) from None
        except msgspec.DecodeError:
            continue
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

    def write_off(self, reason: str, step: int) -> None:
        """Drop every episode that has no line yet and of which nothing is known."""
        for ticket in list(self._in_flight.values()):
            self.dropped(Episode(ticket, (), (), ()), reason, step)

    def trained(self, episode: Episode, trained_tokens: int, step: int) -> None:
        """The episode is part of the weights after `step`."""
        sampled = episode.num_sampled_tokens
        self.tokens["trained"] += trained_tokens
        self.tokens["masked_stale"] += sampled - trained_tokens
        self._add(episode, "trained", "", trained_tokens, sampled - trained_tokens, step)

    def dropped(self, episode: Episode, reason: str, step: int) -> None:
        """The episode will never be trained."""
        self.tokens[f"dropped_{reason}"] += episode.num_sampled_tokens
        self._add(episode, "dropped", reason, 0, 0, step)

    def goodput(self) -> dict[str, float]:
        """Fractions of all sampled tokens by what became of them, under ``goodput/``."""
        total = max(sum(self.tokens.values()), 1)
        return {f"goodput/{name}_fraction": count / total for name, count in sorted(self.tokens.items())}

    def _add(self, episode: Episode, outcome: str, reason: str, trained: int, masked: int, step: int) -> None:
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
        }
        if details["regenerated_tokens"]:
            self.tokens["regenerated"] += details["regenerated_tokens"]
        line = LedgerLine(
            outcome=outcome, reason=reason, trained_tokens=trained, masked_tokens=masked, step=step, **details
        )
        self.write(line)
