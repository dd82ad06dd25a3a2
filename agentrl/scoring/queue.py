"""The line of one scorer: turns that wait, batches, and the workers that carry them out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import xxhash

from agentrl.scorers.definition import UNREACHABLE, TurnScorerConfig
from agentrl.scoring.answers import matched
from agentrl.scoring.pool import Pool
from agentrl.scoring.workers import ScoringWorker, StartWorker
from agentrl.telemetry.run_traces import RunTraces
from agentrl.telemetry.spans import SpanKind
from agentrl.types.errors import AgentRLError, Boundary, EpisodeError, Failure, boundary, deadline
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore

_CACHED = 4096
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_log = logging.getLogger(__name__)
Keep = Callable[[str, Sequence[TurnScore]], Awaitable[None]]
"""Puts what a scorer, by its name, said of some turns on record; returns once that is durable."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A turn in the line, and who waits for its score."""

    turn: ScoredTurn
    since_s: float
    score: asyncio.Future[TurnScore]


@dataclass(slots=True)
class QueueCounts:
    """What happened in a line since the run's process began; see `ScorerQueue.metrics`."""

    totals: Counter[str] = field(default_factory=Counter)
    delays_s: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    batches: deque[int] = field(default_factory=lambda: deque(maxlen=512))
    version: str = ""


class ScorerQueue:
    """Turns that wait for one scorer.

    `ask` puts a turn in the line; whoever asks for the same turn again gets the same answer. `keep` is called with all
    scores of a batch before anybody hears of them. Scores of equal contexts are kept and given without asking, as long
    as the scorer's version is the same.
    """

    def __init__(
        self, config: TurnScorerConfig, start: StartWorker, keep: Keep, traces: RunTraces | None = None
    ) -> None:
        self.config, self.counts, self._traces = config, QueueCounts(), traces or RunTraces()
        self._keep = keep
        self._changed, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._pool = Pool(config, start, self._changed, self.counts.totals)
        self._waiting: OrderedDict[TurnKey, _Asked] = OrderedDict()
        self._in_flight: dict[TurnKey, _Asked] = {}
        self._cache: OrderedDict[tuple[str, int], TurnScore] = OrderedDict()
        self._pause_s, self._paused_until_s = _FIRST_PAUSE_S, 0.0

    @property
    def num_waiting(self) -> int:
        """Turns that no worker has."""
        return len(self._waiting)

    def ask(self, turn: ScoredTurn) -> asyncio.Future[TurnScore]:
        """The turn's score, to come; it has a failure where the scorer gave none."""
        known = self._waiting.get(turn.key) or self._in_flight.get(turn.key)
        if known is not None:
            if known.score.cancelled():
                known.score = asyncio.get_running_loop().create_future()
            return known.score
        asked = _Asked(turn, time.monotonic(), asyncio.get_running_loop().create_future())
        self.counts.totals["asked"] += 1
        self._waiting[turn.key] = asked
        self._note_change()
        return asked.score

    def forget(self, keys: Sequence[TurnKey]) -> int:
        """Take turns whose episode needs them no more out of the line; returns how many waited there."""
        left = [asked for key in keys if (asked := self._waiting.pop(key, None)) is not None]
        for asked in (*left, *(self._in_flight[key] for key in keys if key in self._in_flight)):
            asked.score.cancel()
        self.counts.totals["forgotten"] += len(left)
        self._note_change()
        return len(left)

    async def room(self) -> None:
        """Waits for: the line to be shorter than its bound. Unblocked by: the scorer, or turns that leave the line."""
        await self._has_room.wait()

    async def open(self) -> None:
        """Have the first workers. Raises ConfigError or EpisodeError."""
        await self._pool.open()

    async def close(self) -> None:
        """End the workers of a line that does not run."""
        await self._pool.close()

    async def run(self) -> None:
        """Give waiting turns to workers, one batch after the other.

        Waits for: turns, a free worker, the end of a pause. Unblocked by: `ask`, the end of a batch or of a worker's
        start, time; ends by cancellation. Raises StorageError.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._go_on(tasks)
        finally:
            await self._pool.close()

    async def _go_on(self, tasks: asyncio.TaskGroup) -> None:
        """Begin a batch if there are turns and a worker for it, else wait for a change."""
        self._changed.clear()
        worker = self._pool.free() if self._waiting and not self._rest_s() else None
        if worker is not None:
            tasks.create_task(self._carry_out(worker, self._next_batch()))
            return
        self._pool.scale(tasks, 0.0 if self._rest_s() else self._oldest_wait_s())
        await _changed_or(self._changed, self._rest_s() or self.config.pool.queue_s)

    def metrics(self) -> dict[str, float]:
        """What is counted, under ``scorer/NAME/``."""
        counts = self.counts
        found: dict[str, float] = {f"{name}_total": float(number) for name, number in counts.totals.items()}
        found |= {"waiting_turns": float(len(self._waiting)), "workers": float(self._pool.size)}
        if counts.delays_s:
            found["queue_delay_s"] = sum(counts.delays_s) / len(counts.delays_s)
            found["batch_turns"] = sum(counts.batches) / len(counts.batches)
        return {f"scorer/{self.config.name}/{name}": value for name, value in found.items()}

    def _next_batch(self) -> list[_Asked]:
        """The turns that have waited longest; those whose context was scored before come along and are not sent."""
        batch: list[_Asked] = []
        while self._waiting and len(batch) < self.config.batch_turns:
            key, asked = self._waiting.popitem(last=False)
            self._in_flight[key] = asked
            batch.append(asked)
        self._note_change()
        return batch

    async def _carry_out(self, worker: ScoringWorker, batch: list[_Asked]) -> None:
        """Have a batch scored, put the scores on record, and tell who waits.

        Waits for: the worker, then the disk. Unblocked by: these, or the deadline of a batch.
        """
        now = time.monotonic()
        self.counts.delays_s.extend(now - asked.since_s for asked in batch)
        known = {asked.turn.key: score for asked in batch if (score := self._cached(asked.turn)) is not None}
        self.counts.totals["cached"] += len(known)
        to_send = [asked.turn for asked in batch if asked.turn.key not in known]
        scores = [*known.values()]
        try:
            if to_send:
                self.counts.batches.append(len(to_send))
                scores += await self._sent(worker, to_send)
        except EpisodeError as error:
            if error.failure.kind == UNREACHABLE:
                self._put_back(batch, error.failure)
                return
            scores += [TurnScore(turn.key, self.counts.version, failure=error.failure) for turn in to_send]
        finally:
            self._pool.release(worker)
        self._pause_s = _FIRST_PAUSE_S
        await self._keep(self.config.name, [score for score in scores if score.failure is None])
        self._tell(batch, {score.key: score for score in scores})

    async def _sent(self, worker: ScoringWorker, turns: list[ScoredTurn]) -> list[TurnScore]:
        """One score for each turn, in their order. Raises EpisodeError if none was given."""
        name, num_versions = self.config.name, self.counts.totals["versions"]
        try:
            with boundary(Boundary.SCORER, name):
                async with deadline(f"scorer.{name}", self.config.call_s):
                    scores = matched(turns, await worker.score(turns), self.counts.totals)
        except EpisodeError:
            raise
        except AgentRLError as error:
            raise EpisodeError(Boundary.SCORER, name, str(error)) from error
        said = [(turn, score) for turn, score in zip(turns, scores, strict=True) if score.failure is None]
        # Behind a change of version an answer that was asked for before it may be of the older one.
        version = said[0][1].version if said else ""
        if said and (version == self.counts.version or num_versions == self.counts.totals["versions"]):
            self._note_version(version)
            for turn, score in said:
                self._put_into_cache(turn, score)
        return scores

    def _tell(self, batch: list[_Asked], scores: dict[TurnKey, TurnScore]) -> None:
        now_s = time.monotonic()
        for asked in batch:
            key = asked.turn.key
            self._in_flight.pop(key, None)
            trace = self._traces.of(key.episode_id)
            trace.add(SpanKind.SCORING, f"score.{self.config.name}", asked.since_s, now_s, key.turn)
            score = scores[key]
            self.counts.totals["scored" if score.failure is None else "failed"] += 1
            if not asked.score.done():
                asked.score.set_result(score)
        self._changed.set()

    def _put_back(self, batch: list[_Asked], failure: Failure) -> None:
        """Turns that were not sent go back to the front, and the line rests for a while."""
        self.counts.totals["not_sent"] += len(batch)
        for asked in reversed(batch):
            self._in_flight.pop(asked.turn.key, None)
            if not asked.score.cancelled():
                self._waiting[asked.turn.key] = asked
                self._waiting.move_to_end(asked.turn.key, last=False)
        self._paused_until_s = time.monotonic() + self._pause_s
        _log.warning("scorer %s: %s; asked again in %g s", self.config.name, failure.message, self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._note_change()

    def _rest_s(self) -> float:
        """Seconds until the line goes on after a scorer could not be reached; 0 if it does."""
        return max(self._paused_until_s - time.monotonic(), 0.0)

    def _oldest_wait_s(self) -> float:
        first = next(iter(self._waiting.values()), None)
        return time.monotonic() - first.since_s if first is not None else 0.0

    def _note_change(self) -> None:
        if len(self._waiting) < self.config.pool.max_waiting:
            self._has_room.set()
        else:
            self._has_room.clear()
        self._changed.set()

    def _note_version(self, version: str) -> None:
        if version != self.counts.version:
            self.counts.totals["versions"] += 1
            self.counts.version = version
            self._cache.clear()

    def _cached(self, turn: ScoredTurn) -> TurnScore | None:
        found = self._cache.get(_context(turn))
        return None if found is None else replace(found, key=turn.key)

    def _put_into_cache(self, turn: ScoredTurn, score: TurnScore) -> None:
        self._cache[_context(turn)] = score
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)


def _context(turn: ScoredTurn) -> tuple[str, int]:
    """All that a scorer is told of a turn but its episode: turns with the same have the same score."""
    told = msgspec.json.encode([turn.policy, turn.environment, turn.reply_start, turn.task], order="deterministic")
    return turn.key.digest, xxhash.xxh3_64_intdigest(told)


async def _changed_or(changed: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return
