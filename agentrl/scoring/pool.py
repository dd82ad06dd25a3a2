"""The workers of one scorer: as many as its turns need, within bounds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from agentrl.scorers.definition import TurnScorerConfig
from agentrl.scoring.workers import ScoringWorker, StartWorker
from agentrl.types.errors import AgentRLError, Boundary, EpisodeError, boundary

_IDLE_QUEUES = 30.0  # a worker beyond the least ends when it was idle for that many times `queue_s`
_RETRY_S = 2.0
_CLOSE_S = 10.0
_log = logging.getLogger(__name__)


class Pool:
    """Starts workers, replaces lost ones, and ends those that nothing needs; `changed` is set when one is free."""

    def __init__(
        self, config: TurnScorerConfig, start: StartWorker, changed: asyncio.Event, counts: Counter[str]
    ) -> None:
        self._config, self._start, self._changed, self._counts = config, start, changed, counts
        self._least, self._most = config.pool.least, max(config.pool.least, config.pool.most)
        self._busy: dict[ScoringWorker, int] = {}
        self._idle_since_s: dict[ScoringWorker, float] = {}
        self._starting = 0
        self._next_start_s = 0.0

    @property
    def size(self) -> int:
        """Workers that there are."""
        return len(self._busy)

    async def open(self) -> None:
        """Have the least number of workers. Raises ConfigError or EpisodeError."""
        outcomes = await asyncio.gather(*(self._start() for _ in range(self._least)), return_exceptions=True)
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                self._add(outcome)
        if failure := next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None):
            await self.close()
            raise failure

    def free(self) -> ScoringWorker | None:
        """A worker with room for a batch, which is taken; None without one."""
        able = [worker for worker, batches in self._busy.items() if batches < worker.slots and not worker.is_lost]
        worker = min(able, key=self._busy.__getitem__, default=None)
        if worker is not None:
            self._busy[worker] += 1
        return worker

    def release(self, worker: ScoringWorker) -> None:
        """A batch of the worker has ended."""
        if worker in self._busy:
            self._busy[worker] -= 1
            self._idle_since_s[worker] = time.monotonic()
        self._changed.set()

    def scale(self, tasks: asyncio.TaskGroup, oldest_wait_s: float) -> None:
        """Replace lost workers, start one more if turns wait for too long, end one that was idle for long."""
        for worker in [w for w in self._busy if w.is_lost]:
            self._remove(worker, tasks)
            self._counts["workers_lost"] += 1
        now, number = time.monotonic(), self.size + self._starting
        is_late = oldest_wait_s > self._config.pool.queue_s and number < self._most and not self._starting
        if now >= self._next_start_s and (number < self._least or is_late):
            self._starting += 1
            tasks.create_task(self._start_one())
        limit_s = _IDLE_QUEUES * self._config.pool.queue_s
        idle = [w for w in self._busy if not self._busy[w] and now - self._idle_since_s[w] > limit_s]
        if idle and self.size > self._least:
            self._remove(idle[0], tasks)

    async def close(self) -> None:
        """End all workers."""
        workers, self._busy = list(self._busy), {}
        await asyncio.gather(*(self._end(worker) for worker in workers))

    def _add(self, worker: ScoringWorker) -> None:
        self._busy[worker], self._idle_since_s[worker] = 0, time.monotonic()
        self._counts["workers_started"] += 1
        self._changed.set()

    def _remove(self, worker: ScoringWorker, tasks: asyncio.TaskGroup) -> None:
        del self._busy[worker], self._idle_since_s[worker]
        tasks.create_task(self._end(worker))

    async def _end(self, worker: ScoringWorker) -> None:
        """Waits for: a worker's end. Unblocked by: it, its failure, or a deadline; the worker is used no more."""
        try:
            with boundary(Boundary.SCORER, self._config.name):
                async with asyncio.timeout(_CLOSE_S):
                    await worker.close()
        except AgentRLError as error:
            _log.warning("scorer %s: a worker did not close: %s", self._config.name, error)

    async def _start_one(self) -> None:
        """Waits for: a worker's start. Unblocked by: it, or its failure, after which another is tried later."""
        try:
            self._add(await self._start())
        except EpisodeError as error:
            self._next_start_s = time.monotonic() + _RETRY_S
            _log.warning("scorer %s: %s; tried again in %g s", self._config.name, error, _RETRY_S)
        finally:
            self._starting -= 1
            self._changed.set()
