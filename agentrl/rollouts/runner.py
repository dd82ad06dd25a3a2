"""Plays one episode from ticket to record; whatever goes wrong is in the record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.protocols import Engine, Environment, EnvironmentHost, Scaffold, Scorer, TurnJournal
from agentrl.rollouts.context import Context, EpisodeOver
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.session import Session
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Agent, Episode, StopReason, Ticket
from agentrl.types.errors import Boundary, EpisodeError, Failure, boundary, deadline
from agentrl.types.generation import Sampling
from agentrl.types.task import Limits

_AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that a policy needs to act: its name, engine, chat format and sampling."""

    policy: str
    engine: Engine
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
        journal: TurnJournal,
        limits: Limits,
    ) -> None:
        self._player, self._scaffold = player, scaffold
        self._environments, self._scorer = environments, scorer
        self._journal, self._limits = journal, limits

    def open(self, ticket: Ticket) -> EpisodeRecord:
        """An empty record for a ticket; the caller keeps it, so that it has the record even if the run is cut off."""
        return EpisodeRecord(ticket, (Agent(_AGENT, self._player.policy),))

    async def run(self, record: EpisodeRecord, on_generated: Callable[[], Awaitable[None]]) -> Episode:
        """Play one episode.

        Waits for: engine and environment. Unblocked by: the end, a limit, or the deadline of the episode.
        Never raises for what happens inside the episode; cancellation passes.
        """
        started = time.monotonic()
        try:
            async with deadline("episode", self._limits.total_s):
                await self._play_and_score(record, on_generated)
        except EpisodeError as error:
            if record.score is None:  # an environment that cannot be freed takes nothing from a verdict
                record.failure = error.failure
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            message = "environment or scaffold raised CancelledError, although nobody cancelled the episode"
            record.failure = Failure(Boundary.CANCELLED, "foreign", message)
        return record.close(time.monotonic() - started)

    async def _play_and_score(self, record: EpisodeRecord, on_generated: Callable[[], Awaitable[None]]) -> None:
        with boundary(Boundary.ENVIRONMENT, "open"):
            opened = self._environments.open(record.ticket.task)
        async with opened as environment:
            await self._play(record, environment)
            await on_generated()
            if record.failure is None:
                record.score = await self._scorer.score(environment)

    async def _play(self, record: EpisodeRecord, environment: Environment) -> None:
        player = self._player
        session = Session(record, _AGENT, player.chat, player.engine, player.sampling, self._limits)
        context = Context(record, session, environment, self._journal, self._limits)
        try:
            with boundary(Boundary.SCAFFOLD, "run"):
                await self._scaffold.run(context)
        except EpisodeOver:
            return
        if record.stop_reason is None:
            record.stop_reason = StopReason.ANSWERED
