"""Gives episodes to rollout workers, and hands those of a worker whose process is gone to others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentrl.journal.holder import unpack_history
from agentrl.orchestration.worker_journals import WorkerJournals
from agentrl.protocols import RolloutWorker
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.rollouts.replies import session_key
from agentrl.rollouts.worker import SessionEnd
from agentrl.telemetry.run_traces import RunTraces
from agentrl.telemetry.spans import SpanKind
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import (
    ERRORS_BY_NAME,
    AgentRLError,
    Boundary,
    Failure,
    WorkerLostError,
)
from agentrl.types.rollout import (
    Assignment,
    EpisodeEvent,
    EpisodeFinished,
    EpisodeLeft,
    PackedEntry,
    PlaceFreed,
    TurnPlayed,
    WorkerEvent,
    WorkerFailed,
)

_FAILED_STARTS = 5
_log = logging.getLogger(__name__)
TurnListener = Callable[[Ticket, TurnPlayed], None]
"""Hears of a turn of an episode as soon as it is on record, unless its worker has lost the episode."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """An episode's worker is gone; `entries` are what it put on record."""

    error: WorkerLostError
    entries: tuple[PackedEntry, ...]


@dataclass(slots=True)
class _Held:
    """An episode and the worker that plays it; `inbox` has what is told of it."""

    worker: RolloutWorker
    assignment: Assignment
    has_place: bool = True
    inbox: asyncio.Queue[EpisodeEvent | _Lost] = field(default_factory=asyncio.Queue)


class WorkerPool:
    """Plays episodes with workers that may be lost at any moment.

    An episode goes to the worker with the fewest that generate. If its worker is lost it goes on in another, from what
    is on record and under a new token, while the others never stop; a new process takes the lost one's place. If it has
    a live session it goes on where that is, on the same node, unless no worker comes up there any more. One that has
    cost more than `max_losses` workers ends as failed, and costs the run no more: the loss of a worker counts for the
    episode that it ran at that moment, and for all that it had if that is not known. `start` makes the worker of a
    place, counted from 0. The first episode waits until `num_needed` are up, which is all of them unless it is given.
    """

    def __init__(
        self,
        start: Callable[[int], Awaitable[RolloutWorker]],
        num_workers: int,
        journals: WorkerJournals,
        max_losses: int,
        end_session: SessionEnd,
        on_turn: TurnListener | None = None,
        num_needed: int | None = None,
        traces: RunTraces | None = None,
    ) -> None:
        self._start, self._num_workers, self._on_turn = start, num_workers, on_turn
        self._num_needed = num_workers if num_needed is None else num_needed
        self._traces = traces or RunTraces()
        self._journals, self._max_losses, self._end_session = journals, max_losses, end_session
        self._workers: dict[int, RolloutWorker] = {}
        self._returning: dict[int, str] = {}  # nodes on which a worker is started anew, by its place
        self._held: dict[str, _Held] = {}
        self._changed, self._are_up = asyncio.Event(), asyncio.Event()
        self._is_parking = self._is_over = False
        self._counts: Counter[str] = Counter()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Workers play as long as the block goes on; at its end what they still play is cut off. May be entered again.

        Raises:
            ConfigError: workers cannot be built by the configuration.
            StorageError: a journal cannot be written or read.
            AgentRLError: a worker raised what no episode can cause, or does not start.
        """
        self._are_up.clear()
        try:
            async with asyncio.TaskGroup() as keeping:
                tasks = [keeping.create_task(self._keep(place)) for place in range(self._num_workers)]
                # Else the first that is up would get all episodes of the start.
                await self._are_up.wait()
                yield
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await asyncio.gather(*(worker.close() for worker in self._workers.values()))
            self._workers.clear()

    async def until_up(self) -> None:
        """Waits for: the workers that the first episode waits for."""
        await self._are_up.wait()

    async def play(
        self, ticket: Ticket, entries: tuple[PackedEntry, ...], on_generated: Callable[[], Awaitable[None]]
    ) -> Episode:
        """Play an episode to its end, from the start or from what is on record.

        Waits for: a worker, then the episode. Unblocked by: its end, its deadline, or the loss of worker after worker.

        Raises:
            EpisodeParked: the run stops; the episode is on record.
        """
        losses, near = 0, None
        while True:
            is_traced = self._traces.is_traced(ticket.episode_id)
            held = await self._hand_out(Assignment(ticket, self._journals.next_token(), entries, is_traced), near)
            outcome = await self._outcome(held, on_generated)
            if not isinstance(outcome, _Lost):
                return outcome
            entries += outcome.entries
            # What is known to have run another episode was not ended by this one.
            losses += outcome.error.running in (None, ticket.episode_id)
            history = unpack_history(entries)
            if history is not None and history.ended is not None:
                return history.episode()
            if self._is_parking:
                raise EpisodeParked
            if losses > self._max_losses:
                return await self._give_up(ticket, entries, losses, outcome.error)
            near = held.worker.node if history is not None and history.session is not None else None
            self._counts["handed_over"] += 1

    def park(self) -> None:
        """Let every episode stop at its next safe place."""
        self._is_parking = True
        for worker in self._workers.values():
            worker.park()
        self._changed.set()

    def end(self) -> None:
        """Nobody will resume what is cut off from now on."""
        self._is_over = True
        for worker in self._workers.values():
            worker.end()

    async def cut_off(self, ticket: Ticket) -> Episode:
        """Stop an episode whose `play` was cancelled, and return it as it stands; empty if nobody plays it."""
        held = self._held.pop(ticket.episode_id, None)
        episode = await held.worker.cut_off(ticket.episode_id) if held is not None else None
        return episode or Episode(ticket, (), (), ())

    def metrics(self) -> dict[str, float]:
        """What was counted of workers, under ``workers/``."""
        return {
            "workers/running": float(len(self._workers)),
            "workers/turns_total": float(self._counts["turns"]),
            "workers/restarts_total": float(self._counts["restarts"]),
            "workers/handed_over_total": float(self._counts["handed_over"]),
            "workers/given_up_total": float(self._counts["given_up"]),
        }

    async def _hand_out(self, assignment: Assignment, near: str | None) -> _Held:
        """Give an episode to a worker, if there is one or comes back there, to one on the node `near`.

        Waits for: one. Unblocked by: it; `park`, which raises EpisodeParked; or failed starts, which end the run.
        """
        name, since_s = assignment.ticket.episode_id, time.monotonic()
        while not (able := self._able(near)):
            if self._is_parking:
                raise EpisodeParked
            self._changed.clear()
            await self._changed.wait()
        places = Counter(held.worker.name for held in self._held.values() if held.has_place)
        worker = min(able, key=lambda worker: (places[worker.name], worker.name))
        held = self._held[name] = _Held(worker, assignment)
        await worker.assign(assignment)
        waited = since_s, time.monotonic()
        self._traces.of(name).add(SpanKind.QUEUE, "wait_for_worker", *waited, worker=worker.name)
        return held

    def _able(self, near: str | None) -> list[RolloutWorker]:
        there = [worker for worker in self._workers.values() if worker.node == near]
        return there if there or near in self._returning.values() else list(self._workers.values())

    async def _outcome(self, held: _Held, on_generated: Callable[[], Awaitable[None]]) -> Episode | _Lost:
        """Waits for: what becomes of an episode. Unblocked by: its worker, or the loss of that."""
        while True:
            match await held.inbox.get():
                case PlaceFreed():
                    held.has_place = False
                    await on_generated()
                case EpisodeFinished(episode=episode):
                    return episode
                case EpisodeLeft():
                    raise EpisodeParked
                case _Lost() as lost:
                    return lost

    async def _keep(self, place: int) -> None:
        """Have a worker in a place, one after the other, and deliver what they tell. Ends by cancellation."""
        while True:
            worker = await self._start_worker(place)
            self._workers[place] = worker
            self._returning.pop(place, None)
            # What was said to all was not said to this one.
            if self._is_parking:
                worker.park()
            if self._is_over:
                worker.end()
            self._changed.set()
            if len(self._workers) >= self._num_needed:
                self._are_up.set()
            try:
                while True:
                    self._deliver(worker, await worker.next_event())
            except WorkerLostError as error:
                del self._workers[place]
                self._returning[place] = worker.node
                await self._lose(worker, error)

    async def _start_worker(self, place: int) -> RolloutWorker:
        """Raises AgentRLError if it is lost before it can play, again and again."""
        for failed in range(1, _FAILED_STARTS + 1):
            try:
                return await self._start(place)
            except WorkerLostError as error:
                self._returning.pop(place, None)
                self._changed.set()
                if failed == _FAILED_STARTS:
                    raise AgentRLError(f"a rollout worker did not start {failed} times in a row; {error}") from error
                _log.warning("a rollout worker did not start: %s", error)
        raise AssertionError

    def _deliver(self, worker: RolloutWorker, event: WorkerEvent) -> None:
        """Raises AgentRLError if the worker cannot go on."""
        match event:
            case WorkerFailed(error=error, message=message):
                text = message if error in ERRORS_BY_NAME else f"{worker.name} cannot go on: {error}: {message}"
                raise ERRORS_BY_NAME.get(error, AgentRLError)(text)
            case TurnPlayed():
                self._counts["turns"] += 1
                held = self._held.get(event.episode_id)
                if self._on_turn is not None and held is not None and held.assignment.token == event.token:
                    self._on_turn(held.assignment.ticket, event)
            case _:
                held = self._held.get(event.episode_id)
                if held is None or held.assignment.token != event.token:
                    return
                held.inbox.put_nowait(event)
                if not isinstance(event, PlaceFreed):
                    del self._held[event.episode_id]

    async def _lose(self, worker: RolloutWorker, error: WorkerLostError) -> None:
        """Tell the episodes of a worker that is gone, with what is on record of each. Raises StorageError."""
        self._counts["restarts"] += 1
        lost = {name: held for name, held in self._held.items() if held.worker is worker}
        _log.warning("%s; its %d episodes go on elsewhere", error, len(lost))
        tokens = {name: held.assignment.token for name, held in lost.items()}
        entries = await self._journals.held(worker.name, tokens)
        for name, held in lost.items():
            self._held.pop(name, None)
            held.inbox.put_nowait(_Lost(error, tuple(entries.get(name, ()))))

    async def _give_up(
        self, ticket: Ticket, entries: tuple[PackedEntry, ...], losses: int, error: WorkerLostError
    ) -> Episode:
        """The episode ends as failed, on record. Raises StorageError."""
        self._counts["given_up"] += 1
        message = (
            f"the episode lost its worker {losses} times, the last time: {error}\nIf scaffold or environment end the "
            f"process or never await, mend that; rollout.max_attempts = {self._max_losses} allows no further worker"
        )
        assignment = Assignment(ticket, self._journals.next_token(), entries)
        episode = await self._journals.give_up(assignment, Failure(Boundary.SCAFFOLD, error.kind, message))
        for agent in episode.agents:
            self._end_session(agent.policy, session_key(ticket, agent.name))
        return episode
