"""One session: an environment, who holds it, and what it has answered."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack

from agentrl.envs.wire import Attach, GiveScore, Outcome, SessionCall, Snapshot, Start, Step, lost
from agentrl.protocols import DurableEnvironment
from agentrl.serving.board import Board, Number
from agentrl.types.environment import StepResult, check_opening, check_score, check_step
from agentrl.types.errors import Boundary, EpisodeError, boundary

_log = logging.getLogger(__name__)


class Session:
    """An environment and its record; calls are carried out one after the other, each once.

    The protocol has one call in flight, so the answer of the newest id alone is kept: an older id is refused and does
    nothing. So it is with the result of the newest step, which `Outcome` tells.
    """

    def __init__(
        self,
        handle: str,
        environment: str,
        instance: DurableEnvironment,
        stack: AsyncExitStack,
        token: int,
        board: Board,
    ) -> None:
        """`stack` frees the instance."""
        self.handle, self.environment = handle, environment
        self.begun_s = self.used_s = time.monotonic()
        self._instance, self._stack, self._board = instance, stack, board
        self._token = token
        self._lock = asyncio.Lock()
        self.why_ended, self._is_ended = "", False
        self._ids: set[str] = set()
        self._newest: tuple[str, object] = ("", None)
        self._num_steps = 0
        self._effect_ids: tuple[str, ...] = ()
        self._result: StepResult | EpisodeError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self._lock.locked()

    async def answer(self, call: SessionCall, call_s: float) -> object:
        """Carry a call out, unless it has been: then its first answer.

        Waits for: the calls before it, and the environment. Unblocked by: `call_s` for each of them.

        Raises:
            EpisodeError: the environment failed; or kind ``fenced``, ``lost``, ``repeated``, ``outcome``.
        """
        self.check_holder(call.token)
        async with self._lock:
            self.check_holder(call.token)  # another may have taken the session over meanwhile
            if self._is_ended:
                raise lost(f"session {self.handle} has ended: {self.why_ended}")
            if call.id in self._ids:
                return self._first_answer(call.id)
            self._ids.add(call.id)
            try:
                answer: object = await self._within(call, call_s)
            except EpisodeError as error:
                self._newest = (call.id, error)
                if isinstance(call, Step):
                    self._result = error
                raise
            finally:
                self.used_s = time.monotonic()
            self._newest = (call.id, answer)
            return answer

    async def end(self, why: str) -> None:
        """Free the instance; whoever calls from then on is told why. Safe to call twice.

        Waits for: the call under way. Unblocked by: its end, or its deadline.
        """
        async with self._lock:
            await self._free(why)

    def check_holder(self, token: int) -> None:
        """Let a greater token take the session over, and refuse a smaller one. Raises EpisodeError (kind fenced)."""
        if token < self._token:
            self._board.add(Number.FENCED)
            raise EpisodeError(
                Boundary.ENVIRONMENT,
                "fenced",
                f"session {self.handle} is held under token {self._token}, which is above {token}: it was taken over",
            )
        self._token = token

    def _first_answer(self, call_id: str) -> object:
        self._board.add(Number.REPEATED)
        newest, answer = self._newest
        if call_id != newest:
            raise EpisodeError(
                Boundary.ENVIRONMENT, "repeated", f"call {call_id} was carried out, and its answer is not kept any more"
            )
        if isinstance(answer, EpisodeError):
            raise answer
        return answer

    async def _within(self, call: SessionCall, call_s: float) -> object:
        method = type(call).__struct_config__.tag
        limit = asyncio.timeout(call_s)
        try:
            async with limit:
                with boundary(Boundary.ENVIRONMENT, str(method)):
                    return await self._carry_out(call)
        except TimeoutError as error:
            await self._free(f"its {method} was not done within {call_s:g} s")
            raise EpisodeError(
                Boundary.TIMEOUT, f"environment.{method}", f"not done within {call_s:g} s; the session has ended"
            ) from error

    async def _free(self, why: str) -> None:
        if self._is_ended:
            return
        self.why_ended, self._is_ended = why, True
        try:
            with boundary(Boundary.ENVIRONMENT, "close"):
                await self._stack.aclose()
        except EpisodeError as error:
            _log.warning("the environment of session %s could not be freed: %s", self.handle, error)

    async def _carry_out(self, call: SessionCall) -> object:
        match call:
            case Step():
                return await self._step(call)
            case Start():
                return check_opening(await self._instance.start())
            case GiveScore():
                return check_score(await self._instance.score())
            case Snapshot():
                return await self._instance.snapshot()
            case Outcome():
                return self._outcome(call)
            case Attach():
                return None
        raise TypeError(f"{type(call).__name__} is not for a session")

    async def _step(self, call: Step) -> StepResult:
        self._board.add(Number.STEPS)
        self._num_steps += 1
        self._effect_ids = tuple(tool_call.id for tool_call in call.action.tool_calls)
        self._result = None
        self._result = result = check_step(await self._instance.step(call.action))
        return result

    def _outcome(self, call: Outcome) -> StepResult | None:
        if call.step >= self._num_steps:
            return None
        if call.step < self._num_steps - 1 or call.effect_ids != self._effect_ids:
            raise EpisodeError(
                Boundary.ENVIRONMENT,
                "outcome",
                f"the outcome of the last step alone is kept, which is step {self._num_steps - 1} with calls "
                f"{list(self._effect_ids)}, and not step {call.step} with calls {list(call.effect_ids)}",
            )
        if isinstance(self._result, EpisodeError):
            raise self._result
        return self._result
