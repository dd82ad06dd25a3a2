"""Scores that come behind the end of play: what a step waits for, and what it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.ledger import Ledger, LedgerLine
from agentrl.buffer.step_journal import NoStepJournal
from agentrl.orchestration.production import Production
from agentrl.orchestration.scoring import LateScorer, Scoring
from agentrl.scorers.function import FunctionScorer
from agentrl.telemetry.run_traces import RunTraces
from agentrl.testing.builders import InstantTasks, build_episode, build_ticket
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Episode
from agentrl.types.errors import EpisodeError
from agentrl.types.score import with_scores
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion

V0 = PolicyVersion(0, 0)
Judge = Callable[[Episode], Awaitable[object]]


class Notes(NoStepJournal):
    """Keeps the scores that are put on record."""

    def __init__(self) -> None:
        self.scores: list[ScoreRecord] = []

    async def scored(self, episode_id: str, record: ScoreRecord) -> None:
        self.scores.append(record)


class Play:
    """A buffer of steps of one episode; a run goes on with one that was played and has the verifier's score."""

    def __init__(self, *scorers: LateScorer) -> None:
        self.lines: list[LedgerLine] = []
        self.notes = Notes()
        config = BufferConfig(group_size=1, groups_per_step=1, max_staleness=0, stall_s=20.0)
        terms = BufferTerms({"main": config}, {"fake": EnvironmentTerms(1.0, ("main",))}, {"main": V0}, 0, 1, 1, 100)
        tasks = InstantTasks(lambda n: Task("fake", Split.TRAIN, n))
        self.buffer = MemoryBuffer(terms, tasks, {}, Ledger(self.lines.append))
        self.scoring = Scoring({"fake": scorers}, self.notes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Production]:
        played = build_episode(await self.buffer.admit(), [(2, 0)], reward=None)
        unscored = with_scores(played, [ScoreRecord("verifier", Score(1.0))])
        parts = SimpleNamespace(
            pool=SimpleNamespace(running=_nothing, park=lambda: None),
            journal=SimpleNamespace(hand_over=lambda: ([], (unscored,)), is_durable=True),
            buffer=self.buffer,
            scoring=self.scoring,
            recorder=SimpleNamespace(record_episode=lambda episode: None),
            observer=SimpleNamespace(on_phase=lambda text: None),
            config=SimpleNamespace(environments={"fake": None}, limits_of=lambda name: SimpleNamespace(tool_s=20.0)),
            policies={},
            traces=RunTraces(),
        )
        production = Production(parts)  # type: ignore[arg-type]
        task = asyncio.create_task(production.run())
        try:
            yield production
        finally:
            task.cancel()
            await asyncio.wait([task])


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def judge(function: Judge, weight: float = 0.5, timeout_s: float = 20.0, may_be_missing: bool = False) -> LateScorer:
    return LateScorer(FunctionScorer(function, "judge", weight, timeout_s), may_be_missing)


class Slow:
    """A judge that has begun, and says 0.5 when it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, episode: Episode) -> object:
        self.has_begun.set()
        await self.may_end.wait()
        return 0.5


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_step_waits_for_a_score_that_counts() -> None:
    slow = Slow()
    play = Play(judge(slow.__call__))
    async with play.running():
        taking = asyncio.create_task(play.buffer.take("main", V0))
        await slow.has_begun.wait()
        await some_turns()
        assert not taking.done()
        slow.may_end.set()
        (episode,) = (await taking).episodes
    assert episode.reward == 1.0 + 0.5 * 0.5
    assert [(record.scorer, record.weight) for record in play.notes.scores] == [("judge", 0.5)]
    assert play.scoring.counts == {"scorer/judge/scored_episodes": 1.0}


async def test_a_step_does_not_wait_for_a_score_that_only_records() -> None:
    slow = Slow()
    play = Play(judge(slow.__call__, weight=0.0))
    async with play.running():
        (episode,) = (await play.buffer.take("main", V0)).episodes
        assert episode.reward == 1.0
        await slow.has_begun.wait()
        assert play.notes.scores == []
        slow.may_end.set()
        while not play.notes.scores:
            await asyncio.sleep(0)
    assert play.notes.scores[0].score == Score(0.5)


async def test_a_scorer_that_may_be_missing_holds_a_step_up_until_its_deadline_at_most() -> None:
    play = Play(judge(Slow().__call__, timeout_s=0.01, may_be_missing=True))
    async with play.running():
        (episode,) = (await play.buffer.take("main", V0)).episodes
    assert episode.reward == 1.0, "that of the others"
    [record] = play.notes.scores
    assert (record.score, record.weight, record.failure.kind) == (None, 0.0, "scorer.judge")
    assert play.scoring.counts == {"scorer/judge/failed_episodes": 1.0}


async def test_an_episode_that_a_scorer_which_counts_cannot_judge_is_dropped() -> None:
    async def broken(episode: Episode) -> object:
        raise ValueError("no verdict")

    play = Play(judge(broken))
    async with play.running():
        while not play.lines:
            await asyncio.sleep(0)
    assert (play.lines[0].outcome, play.lines[0].reason) == ("dropped", "scorer_judge")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await play.buffer.take("main", V0)


async def test_a_run_that_parks_leaves_an_unscored_episode_to_its_next_start() -> None:
    slow = Slow()
    play = Play(judge(slow.__call__))
    async with play.running() as production:
        await slow.has_begun.wait()
        await production.park()
    assert (play.lines, play.notes.scores, play.buffer.num_ready("main")) == ([], [], 0)


async def test_what_was_scored_before_is_not_scored_again() -> None:
    asked: list[Any] = []

    async def ask(episode: Episode) -> object:
        asked.append(episode)
        return 1.0

    scoring = Scoring({"fake": [judge(ask)]}, Notes())
    play = Play()
    played = build_episode(await play.buffer.admit(), [(2, 0)], reward=None)
    known = with_scores(played, [ScoreRecord("judge", Score(0.25), 0.5)])
    assert (await scoring.complete(known)).reward == 0.125
    assert asked == []


async def test_functions_that_hang_take_no_thread_from_the_run():
    """The event loop's own threads are few, and a process waits for them at its end."""
    gate = threading.Event()
    scorer = FunctionScorer(lambda episode: gate.wait(), "hung", 1.0, timeout_s=0.05)
    episode = build_episode(build_ticket(), [(2, 0)])
    outcomes = await asyncio.gather(*(scorer.score(episode) for _ in range(64)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EpisodeError] * 64
    async with asyncio.timeout(20):
        assert await asyncio.to_thread(gate.is_set) is False
    gate.set()
