"""A rollout worker on this process's event loop: what plays in the driver, and inside every worker process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.process.ports import LOOPBACK
from agentrl.process.running_mark import RunningMark
from agentrl.protocols import Closing
from agentrl.rollouts.durable import WorkerJournal
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.replies import session_key
from agentrl.rollouts.runner import EpisodeRunner
from agentrl.telemetry.spans import EpisodeTrace, SpanSink
from agentrl.types.episode import Episode
from agentrl.types.errors import AgentRLError
from agentrl.types.rollout import (
    Assignment,
    EpisodeFinished,
    EpisodeLeft,
    PlaceFreed,
    TurnPlayed,
    WorkerEvent,
    WorkerFailed,
)

_log = logging.getLogger(__name__)
SessionEnd = Callable[[str, str], None]
"""Takes a policy's name and the name of a session that asks for nothing more."""


@dataclass(frozen=True, slots=True)
class _InPlay:
    """An episode that is played here."""

    record: EpisodeRecord
    began_at_s: float
    task: asyncio.Task[None]


class LocalWorker:
    """Plays all that it is assigned at once, with a runner for each environment; without a `journal` it keeps nothing.

    It closes the `gateway` of its runners' programs when it is closed.

    With a `mark`, whoever reads it knows which episode runs. `spans` takes those of the episodes that are traced.
    """

    def __init__(
        self,
        name: str,
        runners: Mapping[str, EpisodeRunner],
        journal: WorkerJournal | None,
        end_session: SessionEnd,
        gateway: Closing,
        mark: RunningMark | None = None,
        spans: SpanSink | None = None,
    ) -> None:
        self.name, self.node, self._mark, self._gateway = name, LOOPBACK, mark, gateway
        self._runners, self._journal, self._end_session = dict(runners), journal, end_session
        self._spans = spans
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._in_play: dict[str, _InPlay] = {}
        if journal is not None:
            journal.on_turn = lambda *turn: self._events.put_nowait(TurnPlayed(*turn))

    async def assign(self, assignment: Assignment) -> None:
        """Play an episode."""
        ticket = assignment.ticket
        if self._journal is not None:
            self._journal.assign(assignment)
        trace = EpisodeTrace(ticket.episode_id, self._spans if assignment.is_traced else None)
        record = self._runners[ticket.environment].open(ticket, trace)
        task = asyncio.create_task(self._play(record, assignment.token), name=ticket.episode_id)
        self._in_play[ticket.episode_id] = _InPlay(record, time.monotonic(), task)

    async def next_event(self) -> WorkerEvent:
        """Waits for: the next event. Unblocked by: it; this worker is never lost without its process."""
        return await self._events.get()

    def park(self) -> None:
        """Leave every episode at its next safe place."""
        if self._journal is not None:
            self._journal.park()

    def end(self) -> None:
        """Nobody will resume what is cut off from now on."""
        if self._journal is not None:
            self._journal.end()

    async def cut_off(self, episode_id: str) -> Episode | None:
        """Stop an episode where it is; returns it as it stands, or None if it is not played here."""
        playing = self._in_play.get(episode_id)
        if playing is None:
            return None
        playing.task.cancel()
        await asyncio.wait([playing.task])
        return playing.record.close(time.monotonic() - playing.began_at_s)

    async def close(self) -> None:
        """Cut everything off; safe to call twice."""
        tasks = [playing.task for playing in self._in_play.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._gateway.close()

    async def _play(self, record: EpisodeRecord, token: int) -> None:
        """Play one episode and tell what becomes of it.

        Waits for: the episode. Unblocked by: its own deadline, or cancellation, of which nothing is told.
        """
        name = record.ticket.episode_id

        async def free_place() -> None:
            self._events.put_nowait(PlaceFreed(name, token))

        try:
            playing = self._runners[record.ticket.environment].run(record, free_place)
            episode = await (playing if self._mark is None else self._mark.around(name, playing))
            self._events.put_nowait(EpisodeFinished(name, token, episode))
        except EpisodeParked:
            self._events.put_nowait(EpisodeLeft(name, token))
        except Exception as error:  # noqa: BLE001 - a runner raises what ends the run, and whoever runs it hears of it
            if not isinstance(error, AgentRLError):
                _log.error("%s cannot go on", self.name, exc_info=error)
            self._events.put_nowait(WorkerFailed(type(error).__name__, str(error)))
        finally:
            record.trace.close()
            del self._in_play[name]
            for agent in record.agents:
                self._end_session(agent.policy, session_key(record.ticket, agent.name))
