"""Plays one episode from ticket to record; whatever goes wrong is in the record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.journal.history import EpisodeHistory
from agentrl.protocols import DurableEnvironment, EnvironmentHost, Scaffold, Scorer
from agentrl.rollouts.context import Context, EpisodeOver
from agentrl.rollouts.environment_recovery import leave_alive, open_environment
from agentrl.rollouts.journal import EpisodeJournal, EpisodeLog, EpisodeParked
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.replay import Generating, ReplayingEngine
from agentrl.rollouts.session import Session
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Agent, Episode, StopReason, Ticket
from agentrl.types.errors import Boundary, EpisodeError, Failure, StorageError, boundary, deadline
from agentrl.types.generation import Sampling
from agentrl.types.task import Limits

_AGENT = "agent"
_LEAST_S = 1.0  # a resumed episode whose time is nearly up still gets to its own deadline in order


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that a policy needs to act: its name, engine, chat format and sampling."""

    policy: str
    engine: Generating
    chat: ChatFormat
    sampling: Sampling


class EpisodeRunner:
    """Plays episodes of one kind of environment with one scaffold; many at once on one event loop.

    A runner holds no state of episodes. `on_generated` is called when the policy has said its last
    word, before the environment judges it: from then on the episode needs no place.
    """

    def __init__(
        self,
        player: Player,
        scaffold: Scaffold,
        environments: EnvironmentHost,
        scorer: Scorer,
        journal: EpisodeJournal,
        limits: Limits,
    ) -> None:
        self._player, self._scaffold = player, scaffold
        self._environments, self._scorer = environments, scorer
        self._journal, self._limits = journal, limits

    def open(self, ticket: Ticket) -> EpisodeRecord:
        """An empty record for a ticket; the caller keeps it, so that it has the record even if the run is cut off."""
        return EpisodeRecord(ticket, (Agent(_AGENT, self._player.policy),))

    async def run(self, record: EpisodeRecord, on_generated: Callable[[], Awaitable[None]]) -> Episode:
        """Play one episode, from its start or from where its journal says that it was.

        Waits for: engine and environment. Unblocked by: the end, a limit, or the deadline of the episode.
        Never raises for what happens inside the episode; cancellation passes.

        Raises:
            EpisodeParked: the worker is to stop; the episode is on record.
            StorageError: the journal cannot be written.
        """
        log = await self._journal.open(record.ticket, record.agents)
        started = time.monotonic() - (_seconds_played(log.life) if log.life else 0.0)
        end = _End(record, log, started)
        try:
            async with deadline("episode", max(self._limits.total_s - (time.monotonic() - started), _LEAST_S)):
                await self._play_and_score(record, on_generated, log, end)
        except EpisodeError as error:
            if record.score is None:  # an environment that cannot be freed takes nothing from a verdict
                record.failure = error.failure
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            message = "environment or scaffold raised CancelledError, although nobody cancelled the episode"
            record.failure = Failure(Boundary.CANCELLED, "foreign", message)
        return await end.commit()

    async def _play_and_score(
        self, record: EpisodeRecord, on_generated: Callable[[], Awaitable[None]], log: EpisodeLog, end: _End
    ) -> None:
        with boundary(Boundary.ENVIRONMENT, "open"):
            opened = open_environment(self._environments, record.ticket.task, log)
        async with opened as environment:
            try:
                await self._play(record, environment, log)
                await on_generated()
                if record.failure is None:
                    record.score = await self._scorer.score(environment)
                    # Before the environment is freed: a worker that goes on without the verdict needs it once more.
                    await end.commit()
            except (EpisodeParked, StorageError, asyncio.CancelledError):  # another worker goes on, or has begun to
                if self._environments.recovery.has_handles and log.is_resumable:
                    await leave_alive(environment, self._limits.tool_s)
                raise

    async def _play(self, record: EpisodeRecord, environment: DurableEnvironment, log: EpisodeLog) -> None:
        player = self._player
        engine = player.engine if log.life is None else ReplayingEngine(log.life, player.engine)
        session = Session(record, _AGENT, player.chat, engine, player.sampling, self._limits, log)
        context = Context(record, session, environment, self._environments.recovery, log, self._limits)
        try:
            with boundary(Boundary.SCAFFOLD, "run"):
                await self._scaffold.run(context)
        except EpisodeOver:
            return
        if record.stop_reason is None:
            record.stop_reason = StopReason.ANSWERED


class _End:
    """Puts the end of an episode on record, once."""

    def __init__(self, record: EpisodeRecord, log: EpisodeLog, started: float) -> None:
        self._record, self._log, self._started = record, log, started
        self._episode: Episode | None = None

    async def commit(self) -> Episode:
        """The episode; returns once its end is durable. Raises StorageError."""
        if self._episode is None:
            episode = self._record.close(time.monotonic() - self._started)
            await self._log.ended(episode)
            self._episode = episode
        return self._episode


def _seconds_played(life: EpisodeHistory) -> float:
    """What an episode has used of its time before it was resumed."""
    return sum(turned.turn.generation_s for turned in life.turns) + sum(result.seconds for result in life.results)
