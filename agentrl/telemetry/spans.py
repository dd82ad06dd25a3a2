"""Spans: what a run did from when to when, and on behalf of which episode.

Every process writes those of its own work; where ids have to agree across processes they are made of names.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

Stretch = tuple[float, float]
"""From when to when, in seconds."""
Attributes = dict[str, str | float]
# Of all processes, as near as their clocks are; no later adjustment of the clock moves a span.
_UNIX_MINUS_MONOTONIC_S = time.time() - time.monotonic()
_AT_ONCE_S = 1e-3
_of_this_process, _numbers = secrets.token_hex(4), itertools.count()


class SpanKind(StrEnum):
    """What a span is of; the five in the middle are what an episode can be doing."""

    EPISODE = "episode"
    TURN = "turn"
    GENERATION = "generation"
    WEIGHTS = "waiting_for_weights"
    ENVIRONMENT = "environment"
    SCORING = "scoring"
    QUEUE = "queue"
    STEP = "step"
    PUBLISH = "publish"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work. Times are Unix seconds; `id` and `parent` are 16 hexadecimal digits, no parent is empty.

    `trace` names what all of it belongs to: an episode by its id, or one step or publication of a policy.

    Example: ``Span(SpanKind.GENERATION, "generation", 1764.2, 1764.9, "train-000003-1", "5f1c...", "77ab...")``.
    """

    kind: SpanKind
    name: str
    start_s: float
    end_s: float
    trace: str
    id: str
    parent: str = ""
    attributes: Attributes = field(default_factory=dict)


class SpanSink(Protocol):
    """Takes spans as they end."""

    def write(self, span: Span) -> None:
        """Record a span; one that cannot be is lost, and ends nothing."""

    def close(self) -> None:
        """Let what was written be readable; safe to call twice."""


def unix_s(monotonic_s: float) -> float:
    """The Unix time of a reading of this process's monotonic clock."""
    return monotonic_s + _UNIX_MINUS_MONOTONIC_S


def id_of(*names: object) -> str:
    """The id of a span that several processes speak of, by its names."""
    return hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).hexdigest()


def new_id() -> str:
    """An id that no other span has."""
    return f"{_of_this_process}{next(_numbers) & 0xFFFFFFFF:08x}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to an engine: sent and answered by this process's monotonic clock.

    `stood_still` are stretches of it, counted from its start, in which its engine stood still for new weights.
    """

    sent_s: float
    answered_s: float
    stood_still: Sequence[Stretch] = ()
    tokens: int = 0

    @property
    def begins_still(self) -> bool:
        """Whether the engine stood still when it was sent."""
        return bool(self.stood_still) and self.stood_still[0][0] < _AT_ONCE_S


@dataclass(slots=True)
class _OpenTurn:
    """A turn whose action has not been answered yet."""

    index: int
    stretch: Stretch
    attributes: Attributes


class EpisodeTrace:
    """Writes the spans of one episode, as far as this process takes part in it; without a `sink` it does nothing.

    All times are readings of the monotonic clock. A turn lasts from its first request to an engine to the answer of
    the environment, or to the end of the reply if nothing is done with it.
    """

    def __init__(self, episode: str, sink: SpanSink | None = None) -> None:
        self._episode, self._sink = episode, sink
        self._root = id_of(episode) if sink is not None else ""
        self._turn: _OpenTurn | None = None
        self._num_restored = 0

    def restored(self, turns: int) -> None:
        """So many turns are on record, and come again without being played."""
        self._num_restored = turns

    def add(
        self,
        kind: SpanKind,
        name: str,
        started_s: float,
        ended_s: float,
        turn: int | None = None,
        **attributes: str | float,
    ) -> None:
        """Record a span of the episode, or of one of its turns."""
        if self._sink is not None:
            parent = self._root if turn is None else self._id_of_turn(turn)
            self._write(kind, name, (started_s, ended_s), new_id(), parent, attributes)

    @contextmanager
    def during(self, kind: SpanKind, name: str, **attributes: str | float) -> Iterator[None]:
        """Record a span of the episode that lasts as long as the block, however it ends."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, name, started_s, time.monotonic(), None, **attributes)

    def replied(self, turn: int, agent: str, requests: Sequence[Asked]) -> None:
        """The requests behind one reply, which is or would have been that of a turn."""
        if self._sink is None or turn < self._num_restored or not requests:
            return
        self._end_turn()
        asked_before: Asked | None = None
        for asked in requests:
            if asked_before is not None and asked.begins_still:
                # What was aborted goes on record before the rest is asked for, while the engine stands still.
                self.add(SpanKind.WEIGHTS, str(SpanKind.WEIGHTS), asked_before.answered_s, asked.sent_s, turn)
            for kind, start_s, end_s in _pieces(asked):
                attributes: Attributes = {"tokens": asked.tokens} if kind is SpanKind.GENERATION else {}
                self.add(kind, str(kind), start_s, end_s, turn, **attributes)
            asked_before = asked
        stretch = requests[0].sent_s, requests[-1].answered_s
        self._turn = _OpenTurn(turn, stretch, {"turn": turn, "agent": agent, "requests": len(requests)})

    def acted(self, turn: int, started_s: float, ended_s: float, tools: Sequence[str]) -> None:
        """The environment has carried out a turn's tool calls, or what else the scaffold asked for."""
        if self._sink is None:
            return
        name, called = ("tool_call" if tools else "environment.step"), ", ".join(tools)
        self.add(SpanKind.ENVIRONMENT, name, started_s, ended_s, turn, tools=called)
        if self._turn is not None:
            self._turn.stretch = self._turn.stretch[0], ended_s

    def close(self) -> None:
        """The part of the present process is done; safe to call twice."""
        self._end_turn()

    def ended(self, started_s: float, **attributes: str | float) -> None:
        """The episode is over; it began then."""
        if self._sink is not None:
            self._write(SpanKind.EPISODE, self._episode, (started_s, time.monotonic()), self._root, "", attributes)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            span_id = self._id_of_turn(turn.index)
            self._write(SpanKind.TURN, f"turn {turn.index}", turn.stretch, span_id, self._root, turn.attributes)

    def _id_of_turn(self, turn: int) -> str:
        return id_of(self._episode, turn)

    def _write(
        self, kind: SpanKind, name: str, stretch: Stretch, span_id: str, parent: str, attributes: Attributes
    ) -> None:
        assert self._sink is not None
        start_s, end_s = map(unix_s, stretch)
        self._sink.write(Span(kind, name, start_s, end_s, self._episode, span_id, parent, attributes))


NO_TRACE = EpisodeTrace("")
"""What an episode has that is not traced."""


def _pieces(asked: Asked) -> Iterator[tuple[SpanKind, float, float]]:
    """A request as stretches of generation and of waiting for weights, which tile it."""
    at_s = asked.sent_s
    for start_s, end_s in asked.stood_still:
        start_s, end_s = (min(max(asked.sent_s + moment, at_s), asked.answered_s) for moment in (start_s, end_s))
        if start_s > at_s:
            yield SpanKind.GENERATION, at_s, start_s
        if end_s > start_s:
            yield SpanKind.WEIGHTS, start_s, end_s
        at_s = max(end_s, at_s)
    if asked.answered_s > at_s:
        yield SpanKind.GENERATION, at_s, asked.answered_s
