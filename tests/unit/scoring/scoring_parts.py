"""What tests of the scoring tier need: turns, lines of scripted scorers, and a journal that keeps what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from agentrl.buffer.step_journal import NoStepJournal
from agentrl.scorers.combined import CombinedConfig
from agentrl.scoring.feed import TurnFeed
from agentrl.scoring.queue import ScorerQueue
from agentrl.scoring.tier import Judges, Known, ScoringTier
from agentrl.scoring.workers import LoopWorker, ScoringWorker
from agentrl.testing.scorers import Answer, FaultyScorer, ScriptedConfig, length_score
from agentrl.types.environment import ScoreRecord
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore, token_digest

GENEROUS_S = 120.0


def a_turn(number: int, episode: str = "train-000000-0", context: int | None = None) -> ScoredTurn:
    """Turn `number` of an episode; turns of the same `context` (their number, if none is named) have equal tokens."""
    ids = np.arange(4 + (number if context is None else context), dtype=np.int32)
    return ScoredTurn(TurnKey(episode, "agent", number, token_digest(ids)), "main", ids, 2, "fake")


def says(version: str) -> Answer:
    """A script that answers all turns by their lengths, under a version."""

    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        return [length_score(turn, version) for turn in turns]

    return answer


def raises(error: Exception) -> Answer:
    """A script that answers none."""

    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        raise error

    return answer


async def hangs(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
    """A script that never ends."""
    await asyncio.Event().wait()
    raise AssertionError


class Gate:
    """A script that answers when it may; `has_begun` says that it was asked."""

    def __init__(self, version: str = "slow") -> None:
        self.has_begun, self.may_end, self._version = asyncio.Event(), asyncio.Event(), version

    async def __call__(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        self.has_begun.set()
        await self.may_end.wait()
        return [length_score(turn, self._version) for turn in turns]


class Line:
    """The line of one scripted scorer; `kept` are the scores that it put on record, `scorer` has what was asked."""

    def __init__(self, *scripts: Answer, start: Callable[[], Awaitable[ScoringWorker]] | None = None, **config: Any):
        self.scorer = FaultyScorer(*(scripts or (says("slow"),)))
        self.config = ScriptedConfig(**{"name": "len", "concurrency": 1, **config})
        self.kept: list[tuple[str, TurnScore]] = []
        self.queue = ScorerQueue(self.config, start or self._start, self._keep)

    @property
    def batches(self) -> list[list[int]]:
        """Numbers of the turns of each batch that the scorer got."""
        return [[turn.key.turn for turn in batch] for batch in self.scorer.batches]

    def total(self, name: str) -> float:
        """A counter of the line."""
        return self.queue.metrics().get(f"scorer/{self.config.name}/{name}_total", 0.0)

    async def _start(self) -> ScoringWorker:
        return LoopWorker(self.scorer, self.config)

    async def _keep(self, name: str, scores: Sequence[TurnScore]) -> None:
        self.kept += [(name, score) for score in scores]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScorerQueue]:
        """The line, at work."""
        await self.queue.open()
        task = asyncio.create_task(self.queue.run())
        try:
            async with asyncio.timeout(GENEROUS_S):
                yield self.queue
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class Notes(NoStepJournal):
    """Keeps what is put on record."""

    def __init__(self) -> None:
        self.records: list[ScoreRecord] = []
        self.turns: list[tuple[str, TurnScore]] = []

    async def scored(self, episode_id: str, record: ScoreRecord) -> None:
        self.records.append(record)

    async def turns_scored(self, scorer: str, scores: Sequence[TurnScore]) -> None:
        self.turns += [(scorer, score) for score in scores]


def a_tier(
    *lines: Line,
    required: Sequence[str] = ("len",),
    known: Known | None = None,
    combined: Sequence[CombinedConfig] = (),
) -> tuple[ScoringTier, Notes]:
    """A tier of these scorers for the environment of `build_ticket`."""
    notes = Notes()
    feed = TurnFeed(lambda environment, agent: "main")
    judges = Judges([line.queue for line in lines], combined, frozenset(required))
    return ScoringTier({"fake": judges}, feed, notes, known or {}), notes


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(GENEROUS_S):
        while not holds():
            await asyncio.sleep(0.001)
