"""The journal of one rollout worker: every episode that it plays, durable as it grows.

A reply is durable before the environment acts on it, an intent before it is dispatched, a part of a reply before
its rest is asked for, an end before anybody hears of it. Leases and results are durable before whatever comes next,
since nothing leaves the worker in between, and within some 30 ms: an episode whose lease was lost has done nothing that
anybody knows of, and is dispatched anew; a lost result leaves an intent whose effects are unknown, as a kill does that
came before the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from agentrl.journal.entries import (
    Ended,
    Entry,
    EnvironmentStarted,
    Intended,
    Leased,
    PartialReply,
    StepResultRecorded,
    TurnCommitted,
    pack,
)
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.writer import JournalWriter
from agentrl.process.crash_points import crash_point
from agentrl.rollouts.journal import EpisodeParked
from agentrl.types.environment import Opening, StepResult
from agentrl.types.episode import Agent, Effect, Episode, Node, Ticket, Turn
from agentrl.types.errors import Boundary, boundary
from agentrl.types.generation import FinishReason, Generation


class WorkerJournal:
    """Opens the logs of a worker's episodes, all in one journal, under one fencing token.

    `lives` are the episodes that earlier workers began: each is handed to the log that goes on with it.
    """

    def __init__(self, writer: JournalWriter, token: int, lives: Mapping[str, EpisodeHistory] | None = None) -> None:
        self.writer, self.token = writer, token
        self._lives = dict(lives or {})
        self.is_parking = False
        self.is_over = False

    async def open(self, ticket: Ticket, agents: tuple[Agent, ...]) -> WorkerLog:
        """Lease an episode; nothing of it is durable before the lease, so a lease that is lost never counted."""
        life = self._lives.pop(ticket.episode_id, None)
        taken_over = len(life.entries) if life else 0
        log = WorkerLog(self, ticket.episode_id, life)
        log.note(Leased(ticket, agents, self.token, taken_over))
        crash_point("episode.leased")
        return log

    def park(self) -> None:
        """Let every episode stop at its next safe place."""
        self.is_parking = True


class WorkerLog:
    """One episode's part of a worker's journal.

    While a scaffold is run again over what an earlier worker recorded, the calls are the same as then: as many
    of each kind as `life` holds are not written a second time.
    """

    def __init__(self, journal: WorkerJournal, episode_id: str, life: EpisodeHistory | None) -> None:
        self._journal, self._episode_id = journal, episode_id
        self.life, self.token = life, journal.token
        self._parts = 0
        self._steps = 0

    def check_parking(self) -> None:
        """Raises EpisodeParked when the worker is to stop."""
        if self._journal.is_parking:
            raise EpisodeParked

    @property
    def is_resumable(self) -> bool:
        """Whether another worker may go on with what is cut off now."""
        return not self._journal.is_over

    async def opened(self, opening: Opening, handle: str | None) -> None:
        """The environment has posed the task; told once more where another session has taken over."""
        known = self.life.opened if self.life is not None else None
        if known is None or known.handle != handle:
            with _recordable("the opening"):
                self.note(EnvironmentStarted(self._journal.token, opening, handle))
            crash_point("episode.opened")

    async def delivered(self, part: Generation, request: str) -> None:
        """A part of a reply; durable before the rest is asked for, so that it is never generated again."""
        self._parts += 1
        if self.life is None or self._parts > len(self.life.parts):
            await self.append(PartialReply(self._journal.token, part, request))
            crash_point("reply.delivered")

    async def turned(self, turn: Turn, nodes: Sequence[Node], finish: FinishReason, request: str) -> Turn:
        """A reply is complete; it becomes durable with the intent of what follows from it."""
        if self.life is not None and turn.index < len(self.life.turns):
            return self.life.turns[turn.index].turn
        self.note(TurnCommitted(self._journal.token, turn, tuple(nodes), finish, request))
        crash_point("reply.committed")
        return turn

    async def intended(self, effects: Sequence[Effect]) -> None:
        """The environment is about to act; an intent of an earlier worker is not intended twice."""
        known = len(self.life.results) + (self.life.pending is not None) if self.life else 0
        if self._steps >= known:
            await self.append(Intended(self._journal.token, self._steps, tuple(effects)))
            crash_point("effect.intended")

    async def resulted(
        self, effects: Sequence[Effect], result: StepResult, seconds: float, snapshot: bytes | None
    ) -> tuple[tuple[Effect, ...], float]:
        """The environment has acted."""
        crash_point("effect.dispatched")
        step, self._steps = self._steps, self._steps + 1
        if self.life is not None and step < len(self.life.results):
            recorded = self.life.results[step]
            return recorded.effects, recorded.seconds
        with _recordable(f"the result or the snapshot of step {step}"):
            self.note(StepResultRecorded(self._journal.token, step, tuple(effects), result, seconds, snapshot))
        crash_point("effect.resulted")
        return tuple(effects), seconds

    async def ended(self, episode: Episode) -> None:
        """The episode is over, and will not be played again."""
        crash_point("episode.scored")
        committed = 1 + max((turn.reply_node for turn in episode.turns), default=-1)
        await self.append(
            Ended(
                self._journal.token,
                episode.stop_reason,
                episode.failure,
                episode.reward,
                episode.metrics,
                episode.seconds,
                episode.nodes[committed:],
            )
        )
        crash_point("episode.ended")

    async def append(self, entry: Entry) -> None:
        """Write an entry and wait until it is durable. Raises StorageError."""
        await self._journal.writer.append(*pack(self._episode_id, entry))

    def note(self, entry: Entry) -> None:
        """Write an entry that is durable with any that is appended later, or soon. Raises StorageError."""
        self._journal.writer.note(*pack(self._episode_id, entry))


def _recordable(what: str) -> AbstractContextManager[None]:
    """What an environment gives and the journal refuses is a failure of the environment, not of the scaffold."""
    return boundary(Boundary.ENVIRONMENT, "not_recordable", f"{what} cannot be put on record")
