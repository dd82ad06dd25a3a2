"""The environment of a resumed episode, brought to where the episode is.

In this order, each tried where the one before is not declared or finds its state gone: its live session is
reattached; or a snapshot is restored; or the recorded actions are played into a fresh instance, whose every answer
must equal the recorded one; or the episode fails as infrastructure, and is dispatched anew. To one instance a step is
dispatched at most once: whether one that has no result on record arrived is asked of the reattached session, and an
external call whose outcome nobody knows is never repeated. Nor is a session asked for its verdict twice: one that may
have been is ended, and the next way is tried.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum

from agentrl.journal.entries import StepResultRecorded
from agentrl.journal.history import EpisodeHistory
from agentrl.protocols import DurableEnvironment, EnvironmentHost
from agentrl.rollouts.episode_log import EpisodeLog
from agentrl.rollouts.recorded_replies import nondeterministic
from agentrl.types.environment import Opening, Origin, Recovery, Score, StepResult
from agentrl.types.episode import Effect
from agentrl.types.errors import Boundary, EpisodeError, boundary, deadline
from agentrl.types.message import Message
from agentrl.types.sandbox import Command, CommandResult
from agentrl.types.task import Task

_log = logging.getLogger(__name__)


class RecoveryMethod(StrEnum):
    """How an environment's state was had again."""

    FRESH = "fresh"
    REATTACHED = "reattached"
    RESTORED = "restored"
    REPLAYED = "replayed"


@asynccontextmanager
async def open_environment(host: EnvironmentHost, task: Task, log: EpisodeLog) -> AsyncIterator[DurableEnvironment]:
    """The environment of an episode, new or resumed; freed at the end of the block.

    Raises:
        EpisodeError: it cannot be made, or its state cannot be had again.
    """
    if log.history is None or log.history.opened is None:
        async with host.open(task) as fresh:
            yield fresh
        return
    async with AsyncExitStack() as stack:
        yield await _resume(host, task, log.history, log.token, stack)


async def leave_alive(environment: DurableEnvironment, call_s: float) -> None:
    """Let an environment's session outlive this worker; one that will not is lost when the episode is resumed."""
    try:
        async with deadline("environment.detach", call_s):
            with boundary(Boundary.ENVIRONMENT, "detach"):
                await environment.detach()
    except EpisodeError as error:
        _log.warning("an environment's session could not be left alive: %s", error)


async def end_session(host: EnvironmentHost, task: Task, handle: str, token: int) -> None:
    """End a live session that nobody goes on in; one that is gone already is no error."""
    try:
        async with host.open(task, Origin(handle=handle, token=token)):
            pass
    except EpisodeError as error:
        if not _is_lost(error):
            _log.warning("session %s could not be ended: %s", handle, error)


class ResumedEnvironment:
    """Gives recorded answers while the scaffold is run again, and real ones from then on."""

    def __init__(
        self, instance: DurableEnvironment, history: EpisodeHistory, recovery: Recovery, way: RecoveryMethod
    ) -> None:
        self._instance, self._history, self._recovery = instance, history, recovery
        self._results = list(history.results)
        self._pending = history.pending
        self._snapshot: bytes | None = None
        self.way = way
        # A session that took over in the middle is behind the record until replay is done, and need not count its
        # steps as the episode does: the next worker restores or replays once more.
        self._is_reattachable = way is RecoveryMethod.REATTACHED or not history.results

    async def start(self) -> Opening:
        """The recorded opening."""
        assert self._history.opened is not None
        opening = self._history.opened.opening
        if self.way is RecoveryMethod.REPLAYED and await self._instance.start() != opening:
            raise _differs("its opening")
        return opening

    async def step(self, action: Message) -> StepResult:
        """The recorded result; behind the last of them the real one."""
        if self._results:
            recorded = self._results.pop(0)
            self._snapshot = recorded.snapshot
            return await self._replay(recorded, action)
        pending, self._pending, self._snapshot = self._pending, None, None
        if pending is not None:
            _check_same(pending.effects, action)
        if pending is not None and self.way is RecoveryMethod.REATTACHED:
            known = await self._instance.outcome(pending.step, [effect.effect_id for effect in pending.effects])
            if known is not None:
                return known
        return await self._instance.step(action)

    async def score(self) -> Score:
        """The real verdict."""
        return await self._instance.score()

    async def close(self) -> None:
        """Free the instance."""
        await self._instance.close()

    async def handle(self) -> str | None:
        """Names the live session; None for one that cannot be reattached."""
        return await self._instance.handle() if self._is_reattachable else None

    async def detach(self) -> None:
        """Leave the session alive; one that nobody could find again ends with this worker."""
        if self._is_reattachable:
            await self._instance.detach()

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """The result of a dispatched step."""
        return await self._instance.outcome(step, effect_ids)

    async def snapshot(self) -> bytes:
        """The whole state; during replay the recorded one stands for it."""
        return await self._instance.snapshot() if self._snapshot is None else self._snapshot

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """What a scaffold's program gives."""
        return await self._instance.run(command, effect_id)

    async def stop(self, effect_id: str) -> None:
        """End such a program."""
        await self._instance.stop(effect_id)

    async def _replay(self, recorded: StepResultRecorded, action: Message) -> StepResult:
        _check_same(recorded.effects, action)
        if self.way is not RecoveryMethod.REPLAYED or _num_external(recorded.effects, self._recovery):
            return recorded.result
        if await self._instance.step(action) != recorded.result:
            raise _differs(f"the result of {[call.name for call in action.tool_calls]}")
        return recorded.result


async def _resume(
    host: EnvironmentHost, task: Task, history: EpisodeHistory, token: int, stack: AsyncExitStack
) -> ResumedEnvironment:
    """The environment by the first way that finds its state still there. Raises EpisodeError if none does."""
    recovery = host.description.recovery
    ways = _ways(history, recovery, token)
    if history.is_verdict_lost and history.session is not None:
        await end_session(host, task, history.session, token)
    while ways:
        origin, way = ways.pop(0)
        _check_external(history, recovery, way)
        try:
            instance = await stack.enter_async_context(host.open(task, origin))
            return ResumedEnvironment(instance, history, recovery, way)
        except EpisodeError as error:
            if not ways or not _is_lost(error):
                raise
            _log.warning(
                "the environment of episode %s is not %s, next it is to be %s: %s",
                *(history.ticket.episode_id, way, ways[0][1], error),
            )
    if history.is_verdict_lost:
        raise EpisodeError(
            Boundary.ENVIRONMENT,
            "verdict_unknown",
            f"session {history.session} was to judge the episode, its verdict is not on record, and no session is "
            "asked twice",
        )
    raise EpisodeError(
        Boundary.ENVIRONMENT,
        "lost",
        "its worker is gone, and it declares neither live sessions nor snapshots nor that it is deterministic",
    )


def _ways(history: EpisodeHistory, recovery: Recovery, token: int) -> list[tuple[Origin | None, RecoveryMethod]]:
    """What is declared and on record, in the order of trying."""
    ways: list[tuple[Origin | None, RecoveryMethod]] = []
    opened, last = history.opened, history.results[-1] if history.results else None
    if recovery.has_handles and opened is not None and opened.handle is not None and not history.is_verdict_lost:
        ways.append((Origin(handle=opened.handle, token=token), RecoveryMethod.REATTACHED))
    if recovery.has_snapshots and last is not None and last.snapshot is not None:
        ways.append((Origin(snapshot=last.snapshot, token=token), RecoveryMethod.RESTORED))
    # Nothing has acted yet: a fresh instance that poses the task in the same words is as good as the lost one. So it
    # is before the first snapshot: what an unfinished step did, it did to the lost one.
    is_untouched = not history.results and (history.pending is None or recovery.has_snapshots)
    if recovery.is_deterministic or is_untouched:
        ways.append((None, RecoveryMethod.REPLAYED))
    return ways


def _is_lost(error: EpisodeError) -> bool:
    return (error.failure.boundary, error.failure.kind) == (Boundary.ENVIRONMENT, "lost")


def _check_external(history: EpisodeHistory, recovery: Recovery, way: RecoveryMethod) -> None:
    """Refuse what would need an external call to be repeated, or taken apart from others of its step."""
    if way is RecoveryMethod.REATTACHED:
        return
    if history.pending is not None and _num_external(history.pending.effects, recovery):
        names = ", ".join(sorted({effect.call.name for effect in history.pending.effects}))
        raise EpisodeError(
            Boundary.ENVIRONMENT, "outcome_unknown", f"whether {names} was carried out is not on record; never repeated"
        )
    if way is RecoveryMethod.REPLAYED:
        for result in history.results:
            if 0 < _num_external(result.effects, recovery) < len(result.effects):
                raise EpisodeError(
                    Boundary.ENVIRONMENT,
                    "lost",
                    "a step mixed external and other calls, which cannot be replayed apart",
                )


def _num_external(effects: Sequence[Effect], recovery: Recovery) -> int:
    return sum(effect.call.name in recovery.external_tools for effect in effects)


def _check_same(effects: Sequence[Effect], action: Message) -> None:
    if tuple(effect.call for effect in effects) != action.tool_calls:
        raise nondeterministic(f"the calls {[effect.effect_id for effect in effects]}")


def _differs(what: str) -> EpisodeError:
    return EpisodeError(
        Boundary.ENVIRONMENT, "nondeterministic", f"a fresh instance did not give {what} again as recorded"
    )
