"""What a runner tells of an episode while it is played, and to whom: a journal, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from agentrl.journal.history import EpisodeHistory
from agentrl.types.environment import Opening, ScoreRecord, StepResult
from agentrl.types.episode import Agent, Effect, Episode, Node, Ticket, Turn
from agentrl.types.generation import FinishReason, Generation


class EpisodeParked(BaseException):
    """Leaves an episode where it stands: all of it is on record, and another worker goes on from there.

    Not an `Exception`, so that no scaffold swallows it.
    """


class EpisodeLog(Protocol):
    """Hears of everything that an episode does, in order, before anything follows from it.

    What `history` already holds is heard again while a scaffold is run again, and not recorded twice.
    """

    history: EpisodeHistory | None
    token: int
    """The fencing token under which the worker holds the episode."""

    def check_parking(self) -> None:
        """Raises EpisodeParked when the worker is to stop."""

    async def parking(self) -> None:
        """Waits for: the worker to be told to stop. Unblocked by: that, or cancellation."""

    @property
    def needs_session(self) -> bool:
        """Whether another worker will go on in the environment's live session, if this one leaves it now."""

    async def opened(self, opening: Opening, handle: str | None) -> None:
        """The environment has posed the task."""

    async def delivered(self, part: Generation, request: str, agent: str) -> None:
        """A part of an agent's reply is there; an abort cut it short. Returns once that is durable."""

    async def turned(self, turn: Turn, nodes: Sequence[Node], finish: FinishReason, request: str) -> Turn:
        """A reply is complete; returns the turn as it stands on record."""

    async def synced(self) -> None:
        """Returns once all that was told is durable."""

    async def intended(self, effects: Sequence[Effect]) -> None:
        """The environment is about to act; returns once that and all before it is durable."""

    async def resulted(
        self, effects: Sequence[Effect], result: StepResult, seconds: float, snapshot: bytes | None
    ) -> tuple[tuple[Effect, ...], float]:
        """The environment has acted; returns effects and seconds as they stand on record."""

    async def judging(self, scorer: str) -> None:
        """A live session is about to be asked for its verdict; returns once that is durable."""

    async def scored(self, record: ScoreRecord) -> None:
        """The environment has judged the episode."""

    async def ended(self, episode: Episode) -> None:
        """The episode is played; returns once that, and its score so far, is durable."""


class EpisodeJournal(Protocol):
    """Opens a log for each episode."""

    async def open(self, ticket: Ticket, agents: tuple[Agent, ...]) -> EpisodeLog:
        """The episode's log, with what an earlier worker recorded of it."""


class NoLog:
    """Records nothing: such an episode is simply played again."""

    history: EpisodeHistory | None = None
    token = 0
    needs_session = False

    def check_parking(self) -> None:
        """Nobody parks what is not on record."""

    async def parking(self) -> None:
        """Waits for: nothing that would come. Unblocked by: cancellation."""
        await asyncio.Event().wait()

    async def opened(self, opening: Opening, handle: str | None) -> None:
        """The record in memory is enough."""

    async def delivered(self, part: Generation, request: str, agent: str) -> None:
        """The record in memory is enough."""

    async def turned(self, turn: Turn, nodes: Sequence[Node], finish: FinishReason, request: str) -> Turn:
        """The turn itself."""
        return turn

    async def synced(self) -> None:
        """Nothing is to become durable."""

    async def intended(self, effects: Sequence[Effect]) -> None:
        """Nothing outlives the process, so there is nothing to reconcile."""

    async def resulted(
        self, effects: Sequence[Effect], result: StepResult, seconds: float, snapshot: bytes | None
    ) -> tuple[tuple[Effect, ...], float]:
        """Effects and seconds themselves."""
        return tuple(effects), seconds

    async def judging(self, scorer: str) -> None:
        """The session ends with this worker, so that nobody asks it again."""

    async def scored(self, record: ScoreRecord) -> None:
        """The record in memory is enough."""

    async def ended(self, episode: Episode) -> None:
        """The record in memory is enough."""


class NoJournal:
    """For episodes that nobody resumes: evaluations and teachers' transcripts."""

    async def open(self, ticket: Ticket, agents: tuple[Agent, ...]) -> EpisodeLog:
        """A log that records nothing."""
        return NoLog()
