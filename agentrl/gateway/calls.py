"""The calls of one session that are answered or in the making, so that one that is sent again is answered once."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.gateway.connections import Hearing, Listener
from agentrl.gateway.dialects import Dialect, ReadCall
from agentrl.rollouts.programs import ProgramCalls, SessionOverError
from agentrl.types.program import CallRefusedError, ModelReply

_RETRY_HEADERS = ("x-stainless-retry-count", "x-retry-count")
_IDEMPOTENCY_KEY = "idempotency-key"
# Two sub-agents may ask the very same at once; they are told apart by these alone.
_ASKERS = (_IDEMPOTENCY_KEY, "x-claude-code-agent-id", "thread-id")
# A moment in which the gateway learns that a client has hung up. It is taken in turns of the event loop, each of which
# takes in what connections have to say: a single sleep on a loop that was held up may be over before any was looked at.
_TURNS, _TURN_S = 25, 0.01
_HOW_TO_ANSWER = ("stream", "stream_options")


@dataclass(slots=True, eq=False)
class AnsweredCall:
    """One call: the reply in the making, and the client that is to hear it, the last one of those that asked for it."""

    id: str
    reply: asyncio.Task[ModelReply]
    listener: Listener

    @property
    def has_failed(self) -> bool:
        """Whether there will be no answer."""
        return self.reply.done() and (self.reply.cancelled() or self.reply.exception() is not None)

    async def answer(self) -> ModelReply:
        """The reply, which goes on being made if the caller is cancelled. Raises CallRefusedError."""
        await asyncio.wait([self.reply])
        if self.reply.cancelled():
            raise SessionOverError("its program has ended")
        return self.reply.result()


class Session:
    """The calls of one episode's programs.

    A client whose answer was lost sends its call again: that is not another call, but gets the same answer. It is known
    by an earlier call with the same body whose client has lost the answer, since few programs send a header; with one,
    also by an answer behind which the connection was closed. It may ask for a stream the first time and for a whole
    answer the second. The same asked twice at once is two calls.
    """

    def __init__(self, calls: ProgramCalls) -> None:
        self.calls = calls
        self.key = f"agentrl-{secrets.token_urlsafe(24)}"
        self._answered: defaultdict[str, list[AnsweredCall]] = defaultdict(list)
        self._tasks: set[asyncio.Task[ModelReply]] = set()

    async def begin(
        self, dialect: Dialect, body: bytes, headers: Mapping[str, str], listener: Listener
    ) -> tuple[ReadCall, AnsweredCall]:
        """What a request asks for, and the call that it is, new or sent again, which its client listens to from now on.

        Waits for: clients that asked the same and may have lost the answer. Unblocked by: one that has, or a moment.
        Raises CallRefusedError, and ClientDisconnect if the client is gone by then, so that nothing is drawn for it.
        """
        try:
            read = dialect.read(body)
        except CallRefusedError:
            self.calls.begin()
            self.calls.count("refused")
            raise
        listener.is_streamed = read.is_streamed
        same = self._answered[_name_of(dialect, body, headers)]
        is_keyed = _IDEMPOTENCY_KEY in headers
        is_retry = any(headers.get(name, "0") != "0" for name in _RETRY_HEADERS)
        known = _latest(same, *Hearing) if is_keyed else await _lost(same, is_retry)
        listener.ensure_there()
        if known is not None:
            self.calls.count("sent_again")
            known.listener = listener
            return read, known
        self.calls.begin()
        task = asyncio.create_task(self.calls.reply(read.call, dialect.echo, read.overrides), name="model-call")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        same.append(AnsweredCall(secrets.token_hex(12), task, listener))
        return read, same[-1]

    def end(self) -> None:
        """Cancel what is in the making; counts the replies that no client has heard whole."""
        for call in itertools.chain.from_iterable(self._answered.values()):
            if call.reply.done() and not call.has_failed and not call.listener.is_answered:
                self.calls.count("unheard")
        for task in self._tasks:
            task.cancel()
        self._answered.clear()

    def _forget(self, task: asyncio.Task[ModelReply]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # clients are told of it, those that hung up need not be


def _name_of(dialect: Dialect, body: bytes, headers: Mapping[str, str]) -> str:
    asked = json.loads(body)
    content = {name: asked[name] for name in sorted(asked) if name not in _HOW_TO_ANSWER}
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return "/".join([dialect.name, *(headers.get(name, "") for name in _ASKERS), digest])


async def _lost(same: Sequence[AnsweredCall], is_retry: bool) -> AnsweredCall | None:
    """Of calls that asked the same, one whose client has lost the answer.

    For a client that says that it asks again, that may be one who closed its connection behind the answer.
    """
    for _ in range(_TURNS):
        known = _latest(same, Hearing.LOST)
        if known is not None or not (is_retry or _latest(same, Hearing.OPEN)):
            return known
        await asyncio.sleep(_TURN_S)
    return _latest(same, Hearing.LOST) or (_latest(same, Hearing.CLOSED) if is_retry else None)


def _latest(same: Sequence[AnsweredCall], *hearings: Hearing) -> AnsweredCall | None:
    return next((call for call in reversed(same) if call.listener.hearing in hearings and not call.has_failed), None)
