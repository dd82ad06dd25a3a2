"""The programs of an episode: which agent replies to a call, what all calls together may use, and what ends them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, Protocol

from agentrl.rollouts.conversations import Conversations, Echo
from agentrl.rollouts.episode_log import EpisodeLog, EpisodeParked
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.replies import ContextFullError, TokensSpentError
from agentrl.types.episode import StopReason
from agentrl.types.errors import CUT_OFF, Boundary, ConfigError, EpisodeError, StorageError, trace_of
from agentrl.types.program import CallRefusedError, GatewayAccess, ModelCall, ModelReply
from agentrl.types.task import Limits


class SessionOverError(CallRefusedError):
    """The episode takes no more calls; to send one again is of no use."""

    def __init__(self, why: str) -> None:
        super().__init__(f"this session is over: {why}", status=403, kind="session_over")


class ProgramCalls:
    """The calls that the programs of one episode make.

    `counts` are of the episode: calls, those that were refused, settings that the run's win over, by name.
    """

    def __init__(
        self, record: EpisodeRecord, agents: Mapping[str, Conversations], log: EpisodeLog, limits: Limits
    ) -> None:
        self._record, self._agents, self._log = record, dict(agents), log
        self._max_calls, self.max_context_tokens = limits.max_turns, limits.max_context_tokens
        self._over: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.counts: Counter[str] = record.counts

    @property
    def models(self) -> tuple[str, ...]:
        """The names under which the agents can be called."""
        return tuple(self._agents)

    def begin(self) -> None:
        """Take a call up, whether or not it will be refused. Raises SessionOverError if there may be no more."""
        if self._over.done():
            raise SessionOverError(self._why())
        if self.counts["calls"] >= self._max_calls:
            self._stop(StopReason.MAX_TURNS, f"its {self._max_calls} calls of a policy are spent")
        self.counts["calls"] += 1

    async def reply(self, call: ModelCall, echo: Echo, overrides: Sequence[str] = ()) -> ModelReply:
        """Answer a call that was taken up.

        Raises:
            SessionOverError: the episode takes no more calls.
            CallRefusedError: this one cannot be answered as it is.
        """
        for setting in overrides:
            self.counts[f"overrides_{setting}"] += 1
        if call.model not in self._agents:
            self.counts["overrides_model"] += 1
        try:
            self._log.check_parking()
            return await self._agent(call.model).reply(call, echo)
        except TokensSpentError as error:
            self._stop(StopReason.MAX_TOKENS, str(error))
        except (ContextFullError, ConfigError, EpisodeError) as error:
            refusal = _refusal(error)
            if refusal is None:
                self._end(error)
            self.counts["refused"] += 1
            raise refusal from error
        except (EpisodeParked, StorageError) as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - the program hears nothing of it, and its episode must not go on
            message = f"the call could not be put on record: {type(error).__name__}: {error}"
            self._end(EpisodeError(Boundary.CONTRACT, "program.call", message, trace_of(error)))

    def prompt_tokens(self, call: ModelCall) -> int:
        """How long the prompt of a call would be; it is none of the episode's calls, and nothing of it is on record.

        Raises:
            SessionOverError: the episode takes no more calls.
            CallRefusedError: this one could not be answered as it is.
        """
        if self._over.done():
            raise SessionOverError(self._why())
        try:
            return self._agent(call.model).prompt_tokens(call)
        except (ConfigError, EpisodeError) as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            raise refusal from error

    @property
    def error(self) -> BaseException | None:
        """What ended the session, if it was neither a limit nor its program."""
        return self._over.result() if self._over.done() else None

    async def over(self) -> None:
        """Waits for: the end of the session. Unblocked by: a limit, a failure, or a worker that is to stop."""
        parking = asyncio.create_task(self._log.parking(), name="parking")
        ends: list[asyncio.Future[Any]] = [self._over, parking]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            parking.cancel()
        if not self._over.done():  # what its program did cannot be done again, so there is nothing to wait for
            self._over.set_result(EpisodeParked())

    def close(self) -> None:
        """Answer no further call."""
        if not self._over.done():
            self._over.set_result(None)

    def count(self, what: str) -> None:
        """Count something that happened to a call."""
        self.counts[what] += 1

    def _agent(self, model: str) -> Conversations:
        return self._agents.get(model) or next(iter(self._agents.values()))

    def _stop(self, reason: StopReason, message: str) -> NoReturn:
        if not self._over.done():
            self._record.stop_reason = reason
            self._over.set_result(None)
        raise SessionOverError(message)

    def _end(self, error: BaseException) -> NoReturn:
        if not self._over.done():
            self._over.set_result(error)
        raise SessionOverError("its episode has failed or is to go on elsewhere") from error

    def _why(self) -> str:
        return (
            f"its episode ended ({self._record.stop_reason})" if self._record.stop_reason else "its program has ended"
        )


def _refusal(error: ContextFullError | ConfigError | EpisodeError) -> CallRefusedError | None:
    """What a program is told of a call that cannot be answered as it is; None where it is not the call's fault."""
    match error:
        case ContextFullError():
            return CallRefusedError(str(error), kind="context_length_exceeded")
        case ConfigError():
            return CallRefusedError(str(error))
        case EpisodeError() if error.failure.kind == "chat.template":
            return CallRefusedError(error.failure.message)
    return None


class Gateway(Protocol):
    """Where the programs of this process's episodes reach their policies."""

    def admit(self, calls: ProgramCalls) -> AbstractAsyncContextManager[GatewayAccess]:
        """Answer the calls of an episode within the block; those in flight end with it."""


class Programs:
    """Lets one episode's programs call its policies; `calls` makes what answers them."""

    def __init__(self, gateway: Gateway, calls: Callable[[], ProgramCalls]) -> None:
        self.gateway, self.calls = gateway, calls


def cut_off() -> EpisodeError:
    """The failure of an episode of a program whose worker is gone: what it did cannot be done again."""
    return EpisodeError(
        Boundary.SCAFFOLD,
        CUT_OFF,
        "its program ended with the worker that played it, and a program is never resumed in the middle; the task is "
        "dispatched anew",
    )
