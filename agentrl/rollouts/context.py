"""What a scaffold sees of the world: one context per agent of an episode."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import NoReturn

from agentrl.protocols import DurableEnvironment
from agentrl.rollouts.episode_log import EpisodeLog
from agentrl.rollouts.programs import ProgramCalls, Programs, cut_off
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.replies import ContextFullError, TokensSpentError
from agentrl.rollouts.session import Session
from agentrl.telemetry.spans import SpanKind
from agentrl.types.environment import Opening, Recovery, StepResult, check_opening, check_step
from agentrl.types.episode import Effect, StopReason
from agentrl.types.errors import Boundary, EpisodeError, Failure, boundary, deadline
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, ToolCall, ToolSpec
from agentrl.types.program import GatewayAccess
from agentrl.types.sandbox import Command, CommandResult
from agentrl.types.task import Limits

_SAID_CHARACTERS = 2000


class EpisodeOver(BaseException):
    """Ends a scaffold from inside a context call, with the record's stop reason or failure set.

    Not an `Exception`, so that a scaffold that catches broadly does not swallow the platform's limits,
    and does not go on with an environment that failed.
    """


class AgentTurns:
    """Implements `AgentContext` over a session: the replies of one agent, each on record before anything follows."""

    def __init__(self, record: EpisodeRecord, session: Session, log: EpisodeLog, max_turns: int) -> None:
        self._record, self._session, self._log = record, session, log
        self._max_turns = max_turns
        self._num_turns = 0

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation so far, the same when the episode is resumed."""
        return self._session.context_tokens

    async def generate(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Put messages behind the conversation and let the policy reply."""
        return await self._turn(messages, tools, rewrites=False)

    async def rewrite(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Replace the conversation and let the policy reply, on a branch."""
        return await self._turn(messages, tools, rewrites=True)

    async def _turn(self, messages: Sequence[Message], tools: Sequence[ToolSpec], rewrites: bool) -> Message:
        if self._num_turns >= self._max_turns:
            _end(self._record, StopReason.MAX_TURNS)
        self._log.check_parking()
        call = self._session.rewrite if rewrites else self._session.generate
        try:
            with _ending(self._record):
                reply = await call(messages, tools)
        except (ContextFullError, TokensSpentError):
            _end(self._record, StopReason.MAX_TOKENS)
        self._num_turns += 1
        turn = self._record.last_turn
        nodes = self._record.uncommitted(turn.agent)
        self._record.restore_turn(await self._log.turned(turn, nodes, reply.finish, reply.request))
        if reply.finish is FinishReason.LENGTH:
            _end(self._record, StopReason.LENGTH)
        return reply.message


class Context:
    """Implements `ScaffoldContext` over the agents' sessions, an environment and a log.

    Order of a turn: the reply goes on record, then the intents of its tool calls, then the environment acts,
    then the results go on record. Nothing acts before its intent is durable. Time is what the record says,
    so that a scaffold that is run again sees the same.
    """

    def __init__(
        self,
        record: EpisodeRecord,
        agents: Mapping[str, AgentTurns],
        environment: DurableEnvironment,
        recovery: Recovery,
        log: EpisodeLog,
        limits: Limits,
        programs: Programs | None = None,
    ) -> None:
        self._record, self._agents = record, dict(agents)
        self._environment, self._recovery = environment, recovery
        self._log, self._limits = log, limits
        self._programs = programs
        self._calls: ProgramCalls | None = None
        self._socket: str | None = None
        self._num_programs = 0
        self._random = random.Random(record.ticket.scaffold_seed)
        self._num_made_calls = 0

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents that act in the episode."""
        return tuple(self._agents)

    def agent(self, name: str) -> AgentTurns:
        """An agent's conversation; an unknown name ends the episode as a failure of the scaffold."""
        if name not in self._agents:
            message = f"no agent '{name}' acts here; the recipe names {', '.join(self._agents)}"
            self._record.failure = Failure(Boundary.SCAFFOLD, "unknown_agent", message)
            raise EpisodeOver
        return self._agents[name]

    @property
    def context_tokens(self) -> int:
        """Tokens of the first agent's conversation so far."""
        return self._first.context_tokens

    async def start(self) -> Opening:
        """The environment's opening."""
        starting = self._record.trace.during(SpanKind.ENVIRONMENT, "environment.start")
        with _ending(self._record), starting:
            async with deadline("environment.start", self._limits.tool_s):
                with boundary(Boundary.ENVIRONMENT, "start"):
                    opening = check_opening(await self._environment.start())
                    handle = await self._environment.handle() if self._recovery.has_handles else None
        await self._log.opened(opening, handle)
        return opening

    async def generate(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Put messages behind the conversation and let the policy reply."""
        return await self._first.generate(messages, tools)

    async def rewrite(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Replace the conversation and let the policy reply, on a branch."""
        return await self._first.rewrite(messages, tools)

    async def step(self, action: Message) -> StepResult:
        """Let the environment react to a reply, or to what the scaffold has made of it."""
        self._log.check_parking()
        if self._calls is not None:
            self._raise_end(self._calls)
        if not self._record.num_turns:
            message = "the scaffold acts before any policy has replied; whose action that is cannot be put on record"
            self._record.failure = Failure(Boundary.SCAFFOLD, "no_reply", message)
            raise EpisodeOver
        action = replace(action, tool_calls=tuple(map(self._with_id, action.tool_calls)))
        intents = tuple(Effect(call.id, call) for call in action.tool_calls)
        await self._log.intended(intents)
        started = time.monotonic()
        try:
            with _ending(self._record):
                async with deadline("environment.step", self._limits.tool_s):
                    result, snapshot = await self._act(action)
        finally:
            ended, tools = time.monotonic(), [call.name for call in action.tool_calls]
            self._record.trace.acted(self._record.num_turns - 1, started, ended, tools)
        seconds = ended - started
        effects = _with_results(intents, result, seconds)
        self._record.end_turn(*await self._log.resulted(effects, result, seconds, snapshot))
        if result.is_done:
            self._record.stop_reason = StopReason.ANSWERED
        return result

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[GatewayAccess]:
        """Let programs call the agents' policies within the block, by HTTP.

        An episode that has come this far is never resumed: what a program did cannot be done again.
        """
        with _ending(self._record):
            if self._programs is None:
                raise EpisodeError(Boundary.SCAFFOLD, "no_gateway", "no gateway serves programs where this is played")
            if self._log.history is not None and self._log.history.opened is not None:
                raise cut_off()
        calls = self._programs.calls()
        try:
            async with self._programs.gateway.admit(calls) as access:
                self._calls, self._socket = calls, access.socket
                yield access
            self._raise_end(calls)
        except Exception:
            # What ended the session comes before whatever the scaffold made of the answers that it got since.
            self._raise_end(calls)
            raise
        finally:
            self._calls = self._socket = None
            calls.close()

    async def run(self, command: Command) -> CommandResult:
        """Run a program in the environment's sandbox.

        Waits for: its end. Unblocked by: it, its timeout, or the end of the episode, which stops it.
        """
        self._log.check_parking()
        self._num_programs += 1
        effect_id = f"{self._record.ticket.episode_id}/program-{self._num_programs}"
        command = replace(command, gateway=self._socket)
        running = self._record.trace.during(SpanKind.ENVIRONMENT, "environment.run", effect=effect_id)
        with _ending(self._record), boundary(Boundary.ENVIRONMENT, "run"), running:
            result = await self._run(command, effect_id)
        self._record.counts["programs"] += 1
        self._record.counts["programs_failed"] += result.exit_code != 0
        if self._calls is not None:
            self._raise_end(self._calls)
            if not self._record.num_turns:
                message = f"the program ended without a policy's reply ({result.ended}, exit code {result.exit_code})"
                said = result.text.strip()[-_SAID_CHARACTERS:]
                self._record.failure = Failure(
                    Boundary.SCAFFOLD, "no_calls", f"{message}; the end of its output: {said}"
                )
                raise EpisodeOver
        return result

    async def _run(self, command: Command, effect_id: str) -> CommandResult:
        program = asyncio.create_task(self._environment.run(command, effect_id), name=effect_id)
        over = asyncio.create_task(_until_over(self._calls), name=f"{effect_id}-over")
        try:
            await asyncio.wait({program, over}, return_when=asyncio.FIRST_COMPLETED)
            if not program.done():
                async with deadline("environment.stop", self._limits.tool_s):
                    await self._environment.stop(effect_id)
                    await asyncio.wait({program})
            return program.result()
        finally:
            over.cancel()
            program.cancel()

    def _raise_end(self, calls: ProgramCalls) -> None:
        """End the scaffold if its program's session is over before its time."""
        error = calls.error
        if isinstance(error, EpisodeError):
            self._record.failure = error.failure
        elif error is not None:
            raise error
        if self._record.failure is not None or self._record.stop_reason is not None:
            raise EpisodeOver

    def time(self) -> float:
        """Seconds of generation and environment since the episode began."""
        return self._record.seconds

    @property
    def random(self) -> random.Random:
        """Chance, seeded by the episode."""
        return self._random

    @property
    def _first(self) -> AgentTurns:
        return next(iter(self._agents.values()))

    def _with_id(self, call: ToolCall) -> ToolCall:
        """The call; a made-up one gets an id: unique in the episode, the same when the scaffold is run again."""
        if call.id:
            return call
        self._num_made_calls += 1
        turn = self._record.num_turns - 1
        return replace(call, id=f"{self._record.ticket.player_of(turn)}/{turn}.s{self._num_made_calls - 1}")

    async def _act(self, action: Message) -> tuple[StepResult, bytes | None]:
        """The environment's reaction, and its state afterwards if it gives that away."""
        with boundary(Boundary.ENVIRONMENT, "step"):
            result = check_step(await self._environment.step(action))
            return result, await self._environment.snapshot() if self._recovery.has_snapshots else None


async def _until_over(calls: ProgramCalls | None) -> None:
    """Waits for: the end of a session. Unblocked by: it, or cancellation; without a session by that alone."""
    await (calls.over() if calls is not None else asyncio.Event().wait())


@contextmanager
def _ending(record: EpisodeRecord) -> Iterator[None]:
    """Make a failure the end of the episode, whatever the scaffold would make of it."""
    try:
        yield
    except EpisodeError as error:
        record.failure = error.failure
        raise EpisodeOver from error


def _end(record: EpisodeRecord, reason: StopReason) -> NoReturn:
    record.stop_reason = reason
    raise EpisodeOver


def _with_results(intents: tuple[Effect, ...], result: StepResult, seconds: float) -> tuple[Effect, ...]:
    """Effects with the text of the tool message that answers each."""
    answers = {message.tool_call_id: message.content for message in result.messages}
    return tuple(Effect(e.effect_id, e.call, answers.get(e.effect_id), seconds) for e in intents)
