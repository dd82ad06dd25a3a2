"""The traces of the episodes that a run has in its hands: which are written, and where their spans go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from agentrl.telemetry.spans import NO_TRACE, EpisodeTrace, Span, SpanKind, SpanSink, id_of, new_id, unix_s


class RunTraces:
    """Traces the first `max_episodes` episodes that are admitted, and the run's own work; without a sink nothing.

    `counts` has episodes that were ``traced`` and ``left_out``.
    """

    def __init__(self, sink: SpanSink | None = None, max_episodes: int = 0) -> None:
        self._sink, self._max_episodes = sink, max_episodes
        self._begun: dict[str, tuple[EpisodeTrace, float]] = {}
        self._waiting: dict[str, tuple[EpisodeTrace, float]] = {}
        self.counts: Counter[str] = Counter()

    @property
    def sink(self) -> SpanSink | None:
        """Where spans of this process go."""
        return self._sink

    def begin(self, episode: str) -> None:
        """An episode is admitted, or goes on from an earlier start of the run."""
        if self._sink is None or self.counts["traced"] >= self._max_episodes:
            self.counts["left_out"] += 1
            return
        self.counts["traced"] += 1
        self._begun[episode] = EpisodeTrace(episode, self._sink), time.monotonic()

    def of(self, episode: str) -> EpisodeTrace:
        """An episode's trace while it is played or judged; one that does nothing for an episode that is left out."""
        begun = self._begun.get(episode)
        return begun[0] if begun is not None else NO_TRACE

    def is_traced(self, episode: str) -> bool:
        """Whether an episode that has begun is written."""
        return episode in self._begun

    def end(self, episode: str, **attributes: str | float) -> None:
        """The episode is over: it has the scores that it needs, or it was left."""
        begun = self._begun.pop(episode, None)
        if begun is not None:
            trace, started_s = begun
            trace.ended(started_s, **attributes)
            self._waiting[episode] = trace, time.monotonic()

    def taken(self, episodes: Iterable[str], policy: str, step: int, taken_s: float) -> None:
        """A policy's trainer has taken these then; each has waited for it since it was over."""
        for episode in episodes:
            waiting = self._waiting.pop(episode, None)
            if waiting is not None:
                trace, since_s = waiting
                trace.add(SpanKind.QUEUE, "wait_for_trainer", since_s, taken_s, policy=policy, step=step)

    @contextmanager
    def during(self, kind: SpanKind, name: str, trace: str, **attributes: str | float) -> Iterator[None]:
        """Record a piece of the run's own work that lasts as long as the block, under a root of its trace's name."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, name, trace, started_s, time.monotonic(), **attributes)

    def add(
        self, kind: SpanKind, name: str, trace: str, started_s: float, ended_s: float, **attributes: str | float
    ) -> None:
        """Record a piece of the run's own work; the one that is named as its trace is the root of the others."""
        if self._sink is not None:
            root = id_of(trace)
            ids = (root, "") if name == trace else (new_id(), root)
            self._sink.write(Span(kind, name, unix_s(started_s), unix_s(ended_s), trace, *ids, attributes))

    def metrics(self) -> dict[str, float]:
        """What was counted of episodes, under ``trace/``."""
        return {f"trace/{name}_episodes_total": float(self.counts[name]) for name in ("traced", "left_out")}

    def close(self) -> None:
        """Let what was written be readable; safe to call twice."""
        if self._sink is not None:
            self._sink.close()
