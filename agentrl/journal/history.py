"""An episode's history as its entries tell it: what a worker resumes, or the whole episode once it is over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from agentrl.journal.entries import (
    NO_HOLDER,
    Ended,
    EnvironmentStarted,
    EpisodeEntry,
    Intended,
    Judging,
    Leased,
    PartialReply,
    Scored,
    StepResultRecorded,
    TurnCommitted,
    TurnScored,
)
from agentrl.types.environment import ScoreRecord
from agentrl.types.episode import Agent, Episode, Node, SampledColumns, Ticket, Turn
from agentrl.types.generation import Generation
from agentrl.types.score import combined, own_turn_scores, with_scores
from agentrl.types.turn_score import TurnKey, TurnScore


@dataclass(slots=True)
class EpisodeHistory:
    """The entries of one episode, sorted into what they say.

    `results` are in the order of steps, `acted` has the last of each turn. `scores` are by scorer. `parts` are those of
    replies that no turn has completed; `pending` is an intent without a result: whether its effects happened is not
    known. `turn_scores` are by scorer and turn. `judging` says that the last live session was about to be asked for its
    verdict. `fenced` counts entries of holders that had lost their lease. It `is_whole` unless entries that a later
    holder had found are lost: then it cannot be resumed or trained.

    Example: two turns whose second tool call was cut off: ``turns`` has two, ``results`` one, ``pending`` is set.
    """

    ticket: Ticket
    agents: tuple[Agent, ...]
    token: int
    entries: list[EpisodeEntry] = field(default_factory=list)
    opened: EnvironmentStarted | None = None
    turns: list[TurnCommitted] = field(default_factory=list)
    results: list[StepResultRecorded] = field(default_factory=list)
    acted: dict[int, StepResultRecorded] = field(default_factory=dict)
    pending: Intended | None = None
    parts: list[PartialReply] = field(default_factory=list)
    judging: Judging | None = None
    scores: dict[str, ScoreRecord] = field(default_factory=dict)
    turn_scores: dict[str, dict[TurnKey, TurnScore]] = field(default_factory=dict)
    ended: Ended | None = None
    fenced: int = 0
    is_whole: bool = True

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of its own that the journal holds, the parts of open replies included."""
        own = (turned for turned in self.turns if not self.ticket.is_pinned(turned.turn.index))
        whole = sum(len(turned.nodes[-1].token_ids) for turned in own)
        return whole + sum(len(part.generation.token_ids) for part in self.parts)

    @property
    def is_verdict_lost(self) -> bool:
        """Whether the live session was asked for its verdict, or was about to be, and the answer is not on record."""
        return self.judging is not None and self.judging.scorer not in self.scores

    @property
    def session(self) -> str | None:
        """The live session that the episode has, by the name under which it can be reattached; None without one."""
        return self.opened.handle if self.opened is not None and self.ended is None else None

    def missing(self, required: Iterable[str]) -> list[str]:
        """Scorers that have not judged an episode that was played to its end."""
        is_waiting = self.ended is not None and self.ended.failure is None
        return [name for name in required if name not in self.scores] if is_waiting else []

    @property
    def has_failed(self) -> bool:
        """Whether the episode ended without an outcome, as far as its scores are there."""
        if self.ended is None:
            return False
        if self.ended.failure is not None or any(s.failure is not None and s.weight for s in self.scores.values()):
            return True
        turns = {turned.turn.index: turned.turn.agent for turned in self.turns}
        return combined(self.scores.values(), turns, [agent.name for agent in self.agents]).reward is None

    def episode(self) -> Episode:
        """The episode as far as it was played, the parts of open replies included; with its outcome if it has ended.

        Its seconds are those of its turns until it has ended.
        """
        ended, turns = self.ended, tuple(self._turn(turned) for turned in self.turns)
        nodes = [node for turned in self.turns for node in turned.nodes]
        played = Episode(
            ticket=self.ticket,
            agents=self.agents,
            # Of an episode that has ended, what no turn committed came with its end.
            nodes=tuple(nodes + list(ended.nodes if ended else self.open_replies())),
            turns=turns,
            stop_reason=ended.stop_reason if ended else None,
            failure=ended.failure if ended else None,
            seconds=ended.seconds if ended else sum(turn.generation_s + turn.environment_s for turn in turns),
            counts=ended.counts if ended else {},
        )
        played = replace(played, turn_scores=own_turn_scores(played, self.turn_scores))
        return with_scores(played, list(self.scores.values())) if ended else played

    def open_replies(self) -> tuple[Node, ...]:
        """The parts of each open reply as a node behind the last of its agent: what came between is not on record."""
        nodes = [node for turned in self.turns for node in turned.nodes]
        whole = len(nodes)
        for request in dict.fromkeys(part.request for part in self.parts):
            parts = [part for part in self.parts if part.request == request]
            agent = parts[-1].agent or self.agents[0].name
            parent = max((node.index for node in nodes[:whole] if node.agent == agent), default=None)
            # Which experts were used between the parent and the reply is not on record either.
            drawn = reduce(Generation.followed_by, (replace(part.generation, routed_experts=None) for part in parts))
            sample = SampledColumns.of(drawn)
            nodes.append(Node(len(nodes), parent, agent, len(self.turns), drawn.token_ids, sample, is_open=True))
        return tuple(nodes[whole:])

    def _turn(self, turned: TurnCommitted) -> Turn:
        """The turn with what the environment did behind it."""
        turn, resulted = turned.turn, self.acted.get(turned.turn.index)
        if resulted is None:
            return turn
        return replace(turn, effects=resulted.effects, environment_s=resulted.seconds)


def build_history(entries: list[EpisodeEntry]) -> EpisodeHistory | None:
    """An episode's history from its entries in the order of their writing; None without a lease."""
    valid, fenced = unfenced(entries)
    leases = [entry for entry in valid if isinstance(entry, Leased)]
    if not leases:
        return None
    history = EpisodeHistory(leases[-1].ticket, leases[-1].agents, leases[-1].token, valid, fenced=fenced)
    history.is_whole = len(without_gaps(entries)) == len(entries)
    for entry in valid:
        _apply(history, entry)
    return history


def unfenced(entries: list[EpisodeEntry]) -> tuple[list[EpisodeEntry], int]:
    """The entries that count, and how many do not because their writer had lost its lease."""
    holders = [(entry.token, entry.taken_over if isinstance(entry, Leased) else None) for entry in entries]
    valid = [entries[place] for place in counting(holders)]
    return valid, len(entries) - len(valid)


def counting(holders: Sequence[tuple[int, int | None]]) -> list[int]:
    """Which of an episode's entries count, in order, by the token of each and what those that are leases took over.

    Entries of several writers may come in any order between holders: a holder's token puts them in order. Those of no
    holder, scores that came later, are behind all.

    Example: in ``[(1, 0), (1, None), (1, None), (2, 2), (2, None)]`` the third does not: ``[0, 1, 3, 4]``.
    """
    valid: list[int] = []
    for place in sorted(range(len(holders)), key=lambda place: _rank(holders[place][0])):
        taken_over = holders[place][1]
        if taken_over is not None:
            del valid[taken_over:]
        valid.append(place)
    return valid


def without_gaps(entries: Sequence[EpisodeEntry]) -> list[EpisodeEntry]:
    """The entries of one episode before the first whose holder lacks its lease, or found more than is there."""
    kept: list[EpisodeEntry] = []
    num_valid = token = 0
    for entry in sorted(entries, key=lambda entry: _rank(entry.token)):
        if isinstance(entry, Leased):
            if entry.taken_over > num_valid:
                break
            num_valid, token = entry.taken_over, entry.token
        if entry.token not in (token, NO_HOLDER):
            break
        num_valid += 1
        kept.append(entry)
    return kept


def _rank(token: int) -> float:
    return math.inf if token == NO_HOLDER else token


def _apply(history: EpisodeHistory, entry: EpisodeEntry) -> None:
    match entry:
        case EnvironmentStarted():
            history.opened = entry
            history.judging = None
        case PartialReply():
            history.parts.append(entry)
        case TurnCommitted():
            history.turns.append(entry)
            # A program may have several replies in the making; each part names what its reply continues.
            history.parts = [part for part in history.parts if part.request != entry.request]
        case Intended():
            history.pending = entry
        case StepResultRecorded():
            history.results.append(entry)
            history.acted[len(history.turns) - 1] = entry
            history.pending = None
        case Judging():
            history.judging = entry
        case Scored():
            history.scores[entry.record.scorer] = entry.record
        case TurnScored():
            history.turn_scores.setdefault(entry.scorer, {}).setdefault(entry.score.key, entry.score)
        case Ended():
            history.ended = entry
