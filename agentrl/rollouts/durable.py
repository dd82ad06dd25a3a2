"""The journal of one rollout worker: every episode that it plays, durable as it grows.

A reply is durable before the environment acts on it, an intent before it is dispatched, a part of a reply before
its rest is asked for, an end before anybody hears of it. Leases and results are durable before whatever comes next,
since nothing leaves the worker in between, and within some 30 ms: an episode whose lease was lost has done nothing that
anybody knows of, and is dispatched anew; a lost result leaves an intent whose effects are unknown, as a kill does that
came before the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from agentrl.journal.entries import (
    Ended,
    Entry,
    EnvironmentStarted,
    Intended,
    Judging,
    Leased,
    PartialReply,
    Scored,
    StepResultRecorded,
    TurnCommitted,
    pack,
)
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.holder import unpack_history
from agentrl.journal.writer import JournalWriter
from agentrl.process.crash_points import crash_point
from agentrl.rollouts.episode_log import EpisodeParked
from agentrl.types.environment import Opening, ScoreRecord, StepResult
from agentrl.types.episode import Agent, Effect, Episode, Node, Ticket, Turn
from agentrl.types.errors import Boundary, boundary
from agentrl.types.generation import FinishReason, Generation
from agentrl.types.rollout import Assignment


class WorkerJournal:
    """Opens the logs of the episodes that a worker was assigned, in one journal, each under its own fencing token."""

    def __init__(self, writer: JournalWriter) -> None:
        self.writer = writer
        self._assigned: dict[str, tuple[int, EpisodeHistory | None]] = {}
        self.on_turn: Callable[[str, int, int, tuple[Node, ...]], None] = _nobody_hears
        self.parking = asyncio.Event()
        self.is_over = False

    def assign(self, assignment: Assignment) -> None:
        """Hold an episode under its token once it is opened, and go on from its entries."""
        self._assigned[assignment.ticket.episode_id] = assignment.token, unpack_history(assignment.entries)

    async def open(self, ticket: Ticket, agents: tuple[Agent, ...]) -> WorkerLog:
        """Lease an episode; nothing of it is durable before the lease, so a lease that is lost never counted."""
        token, history = self._assigned.pop(ticket.episode_id)
        taken_over = len(history.entries) if history else 0
        log = WorkerLog(self, ticket.episode_id, token, history)
        log.note(Leased(ticket, agents, token, taken_over))
        crash_point("episode.leased")
        return log

    def park(self) -> None:
        """Let every episode stop at its next safe place."""
        self.parking.set()

    def end(self) -> None:
        """Nobody will resume what is cut off from now on."""
        self.is_over = True


class WorkerLog:
    """One episode's part of a worker's journal.

    While a scaffold is run again over what an earlier worker recorded, the calls are the same as then: as many
    of each kind as `history` holds are not written a second time.
    """

    def __init__(self, journal: WorkerJournal, episode_id: str, token: int, history: EpisodeHistory | None) -> None:
        self._journal, self._episode_id = journal, episode_id
        self.history, self.token = history, token
        self._handle: str | None = None
        self._is_judging = False
        self._parts = 0
        self._steps = 0

    def check_parking(self) -> None:
        """Raises EpisodeParked when the worker is to stop."""
        if self._journal.parking.is_set():
            raise EpisodeParked

    async def parking(self) -> None:
        """Waits for: the worker to be told to stop. Unblocked by: that, or cancellation."""
        await self._journal.parking.wait()

    @property
    def needs_session(self) -> bool:
        """Whether another worker will go on in the environment's live session, if this one leaves it now."""
        return self._handle is not None and not self._is_judging and not self._journal.is_over

    async def opened(self, opening: Opening, handle: str | None) -> None:
        """The environment has posed the task; told once more where another session has taken over."""
        self._handle = handle
        known = self.history.opened if self.history is not None else None
        if known is None or known.handle != handle:
            with _recordable("the opening"):
                self.note(EnvironmentStarted(self.token, opening, handle))
            crash_point("episode.opened")

    async def delivered(self, part: Generation, request: str, agent: str) -> None:
        """A part of an agent's reply; durable before the rest is asked for, so that it is never generated again."""
        self._parts += 1
        if self.history is None or self._parts > len(self.history.parts):
            await self.append(PartialReply(self.token, part, request, agent))
            crash_point("reply.delivered")

    async def turned(self, turn: Turn, nodes: Sequence[Node], finish: FinishReason, request: str) -> Turn:
        """A reply is complete; it becomes durable with the intent of what follows from it."""
        if self.history is not None and turn.index < len(self.history.turns):
            return self.history.turns[turn.index].turn
        self.note(TurnCommitted(self.token, turn, tuple(nodes), finish, request))
        crash_point("reply.committed")
        bare = tuple(replace(node, sample=None) for node in nodes)
        self._journal.on_turn(self._episode_id, self.token, turn.index, bare)
        return turn

    async def synced(self) -> None:
        """Returns once all that was told is durable. Raises StorageError."""
        await self._journal.writer.flush()

    async def intended(self, effects: Sequence[Effect]) -> None:
        """The environment is about to act; an intent of an earlier worker is not intended twice."""
        known = len(self.history.results) + (self.history.pending is not None) if self.history else 0
        if self._steps >= known:
            await self.append(Intended(self.token, self._steps, tuple(effects)))
            crash_point("effect.intended")

    async def resulted(
        self, effects: Sequence[Effect], result: StepResult, seconds: float, snapshot: bytes | None
    ) -> tuple[tuple[Effect, ...], float]:
        """The environment has acted."""
        crash_point("effect.dispatched")
        step, self._steps = self._steps, self._steps + 1
        if self.history is not None and step < len(self.history.results):
            recorded = self.history.results[step]
            return recorded.effects, recorded.seconds
        with _recordable(f"the result or the snapshot of step {step}"):
            self.note(StepResultRecorded(self.token, step, tuple(effects), result, seconds, snapshot))
        crash_point("effect.resulted")
        return tuple(effects), seconds

    async def judging(self, scorer: str) -> None:
        """The live session is about to be asked for its verdict; durable, since nobody asks it twice."""
        await self.append(Judging(self.token, scorer))
        self._is_judging = True

    async def scored(self, record: ScoreRecord) -> None:
        """The environment has judged the episode; durable with its end."""
        self._is_judging = False
        if self.history is None or record.scorer not in self.history.scores:
            self.note(Scored(self.token, record))

    async def ended(self, episode: Episode) -> None:
        """The episode is over, and will not be played again."""
        crash_point("episode.scored")
        committed = 1 + max((turn.reply_node for turn in episode.turns), default=-1)
        await self.append(
            Ended(
                self.token,
                episode.stop_reason,
                episode.failure,
                episode.seconds,
                episode.nodes[committed:],
                episode.counts,
            )
        )
        self._handle = None
        crash_point("episode.ended")

    async def append(self, entry: Entry) -> None:
        """Write an entry and wait until it is durable. Raises StorageError."""
        await self._journal.writer.append(*pack(self._episode_id, entry))

    def note(self, entry: Entry) -> None:
        """Write an entry that is durable with any that is appended later, or soon. Raises StorageError."""
        self._journal.writer.note(*pack(self._episode_id, entry))


def _nobody_hears(episode_id: str, token: int, turn: int, nodes: tuple[Node, ...]) -> None:
    """Turns are on record, and nobody asks for more."""


def _recordable(what: str) -> AbstractContextManager[None]:
    """What an environment gives and the journal refuses is a failure of the environment, not of the scaffold."""
    return boundary(Boundary.ENVIRONMENT, "not_recordable", f"{what} cannot be put on record")
