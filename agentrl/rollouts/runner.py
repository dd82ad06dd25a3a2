"""Plays one episode from ticket to record; whatever goes wrong is in the record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import FrameType

from agentrl.journal.history import EpisodeHistory
from agentrl.protocols import DurableEnvironment, EnvironmentHost, Scaffold, Verifying
from agentrl.rollouts.context import AgentTurns, Context, EpisodeOver
from agentrl.rollouts.conversations import Conversations
from agentrl.rollouts.environment_recovery import leave_alive, open_environment
from agentrl.rollouts.episode_log import EpisodeJournal, EpisodeLog, EpisodeParked
from agentrl.rollouts.programs import Gateway, ProgramCalls, Programs
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.recorded_replies import Generating, RecordedReplies, ReplayingEngine
from agentrl.rollouts.replies import ReplySampler
from agentrl.rollouts.session import Session
from agentrl.telemetry.spans import NO_TRACE, EpisodeTrace, SpanKind
from agentrl.tokens.chat import ChatFormat
from agentrl.types.environment import ScoreRecord
from agentrl.types.episode import Agent, Episode, StopReason, Ticket
from agentrl.types.errors import Boundary, EpisodeError, Failure, StorageError, boundary, deadline
from agentrl.types.generation import Sampling
from agentrl.types.task import Limits

_LEAST_S = 1.0  # a resumed episode whose time is nearly up still gets to its own deadline in order


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that a policy needs to act: its name, engine, chat format and sampling.

    `limits` bound the turns and tokens of each of its agents; None stands for the episode's.
    """

    policy: str
    engine: Generating
    chat: ChatFormat
    sampling: Sampling
    limits: Limits | None = None


class EpisodeRunner:
    """Plays episodes of one kind of environment with one scaffold; many at once on one event loop.

    A runner holds no state of episodes. `players` has the player behind each agent, in the recipe's order.
    `on_generated` is called when the policies have said their last
    word, before the environment judges it: from then on the episode needs no place.
    """

    def __init__(
        self,
        players: Mapping[str, Player],
        scaffold: Scaffold,
        environments: EnvironmentHost,
        verifier: Verifying | None,
        journal: EpisodeJournal,
        limits: Limits,
        gateway: Gateway | None = None,
    ) -> None:
        self._players, self._scaffold, self._gateway = dict(players), scaffold, gateway
        self._environments, self._verifier = environments, verifier
        self._journal, self._limits = journal, limits

    @property
    def scaffold(self) -> str:
        """The scaffold's class, as ``module:name``."""
        kind = type(self._scaffold)
        return f"{kind.__module__}:{kind.__qualname__}"

    def open(self, ticket: Ticket, trace: EpisodeTrace = NO_TRACE) -> EpisodeRecord:
        """An empty record for a ticket; the caller keeps it, so that it has the record even if the run is cut off."""
        agents = tuple(Agent(name, player.policy) for name, player in self._players.items())
        return EpisodeRecord(ticket, agents, trace)

    async def run(self, record: EpisodeRecord, on_generated: Callable[[], Awaitable[None]]) -> Episode:
        """Play one episode, from its start or from where its journal says that it was.

        Waits for: engine and environment. Unblocked by: the end, a limit, or the deadline of the episode.
        Never raises for what happens inside the episode; cancellation passes.

        Raises:
            EpisodeParked: the worker is to stop; the episode is on record.
            StorageError: the journal cannot be written.
        """
        log = await self._journal.open(record.ticket, record.agents)
        started = time.monotonic() - (_seconds_played(log.history) if log.history else 0.0)
        record.trace.restored(len(log.history.turns) if log.history else 0)
        end = _End(record, log, started)
        try:
            async with deadline("episode", max(self._limits.total_s - (time.monotonic() - started), _LEAST_S)):
                await self._play_and_score(record, on_generated, log, end)
        except EpisodeError as error:
            if not record.scores:  # an environment that cannot be freed takes nothing from a verdict
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
        async with _traced(opened, record.trace) as environment:
            try:
                await self._play(record, environment, log)
                await on_generated()
                if record.failure is None and self._verifier is not None:
                    await self._verify(self._verifier, record, environment, log)
                    # Before the environment is freed: a worker that goes on without the verdict needs it once more.
                    await end.commit()
            except (EpisodeParked, StorageError, asyncio.CancelledError):  # another worker goes on, or has begun to
                if log.needs_session:
                    await leave_alive(environment, self._limits.tool_s)
                raise

    async def _verify(
        self, verifier: Verifying, record: EpisodeRecord, environment: DurableEnvironment, log: EpisodeLog
    ) -> None:
        """Have the environment judge the episode, unless an earlier worker did."""
        verdict = log.history.scores.get(verifier.name) if log.history is not None else None
        if verdict is None:
            if self._environments.description.recovery.has_handles:
                await log.judging(verifier.name)
            with record.trace.during(SpanKind.SCORING, f"score.{verifier.name}"):
                verdict = ScoreRecord(verifier.name, await verifier.score(environment), verifier.weight)
        await log.scored(verdict)
        record.scores.append(verdict)

    async def _play(self, record: EpisodeRecord, environment: DurableEnvironment, log: EpisodeLog) -> None:
        replies = RecordedReplies(log.history) if log.history is not None else None
        agents = {name: self._agent(name, player, record, replies, log) for name, player in self._players.items()}
        recovery, programs = self._environments.description.recovery, self._programs(record, log)
        context = Context(record, agents, environment, recovery, log, self._limits, programs)
        try:
            with boundary(Boundary.SCAFFOLD, "run"):
                await self._scaffold.run(context)
        except EpisodeOver:
            return
        if record.stop_reason is None:
            record.stop_reason = StopReason.ANSWERED

    def _agent(
        self, name: str, player: Player, record: EpisodeRecord, replies: RecordedReplies | None, log: EpisodeLog
    ) -> AgentTurns:
        engine = player.engine if replies is None else ReplayingEngine(replies, name, player.engine)
        limits = player.limits or self._limits
        session = Session(record, name, player.chat, engine, player.sampling, limits, log)
        return AgentTurns(record, session, log, limits.max_turns)

    def _programs(self, record: EpisodeRecord, log: EpisodeLog) -> Programs | None:
        """What lets programs call the policies; None where nothing is to."""

        def conversations(name: str, player: Player) -> Conversations:
            limits = player.limits or self._limits
            stop_token_ids = player.chat.stop_token_ids
            sampler = ReplySampler(record, name, player.engine, stop_token_ids, player.sampling, limits, log)
            return Conversations(record, name, player.chat, sampler, log)

        def calls() -> ProgramCalls:
            agents = {name: conversations(name, player) for name, player in self._players.items()}
            return ProgramCalls(record, agents, log, self._limits)

        return Programs(self._gateway, calls) if self._gateway is not None else None


@asynccontextmanager
async def _traced(
    opened: AbstractAsyncContextManager[DurableEnvironment], trace: EpisodeTrace
) -> AsyncIterator[DurableEnvironment]:
    """An environment, of which the trace tells how long it was waited for, and how long it took to be freed."""
    with trace.during(SpanKind.QUEUE, "environment.open"):
        environment = await opened.__aenter__()
    left_s = time.monotonic()
    try:
        async with AsyncExitStack() as closing:
            closing.push_async_exit(opened)
            try:
                yield environment
            finally:
                left_s = time.monotonic()
    finally:
        trace.add(SpanKind.ENVIRONMENT, "environment.close", left_s, time.monotonic())


def played_in(frame: FrameType | None) -> str | None:
    """What plays in the stack of a frame, as words: its scaffold, its episode; None if nothing does."""
    while frame is not None and frame.f_code is not EpisodeRunner.run.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    runner, record = frame.f_locals["self"], frame.f_locals["record"]
    return f"scaffold {runner.scaffold} plays episode {record.ticket.episode_id}"


class _End:
    """Puts the end of an episode on record, once."""

    def __init__(self, record: EpisodeRecord, log: EpisodeLog, started: float) -> None:
        self._record, self._log, self._started = record, log, started
        self._episode: Episode | None = None

    async def commit(self) -> Episode:
        """The episode; returns once its end is durable. Raises StorageError."""
        if self._episode is None:
            episode = self._with_history(self._record.close(time.monotonic() - self._started))
            await self._log.ended(episode)
            self._episode = episode
        return self._episode

    def _with_history(self, played: Episode) -> Episode:
        """The episode; one that failed before it came to where its record is keeps all that is on record."""
        history = self._log.history
        if history is None or played.failure is None or played.num_sampled_tokens >= history.num_sampled_tokens:
            return played
        return replace(history.episode(), failure=played.failure, seconds=played.seconds)


def _seconds_played(history: EpisodeHistory) -> float:
    """What an episode has used of its time before it was resumed."""
    return sum(turned.turn.generation_s for turned in history.turns) + sum(result.seconds for result in history.results)
