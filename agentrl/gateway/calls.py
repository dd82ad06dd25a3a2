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

from agentrl.gateway.dialects import Dialect, ReadCall
from agentrl.rollouts.programs import ProgramCalls, SessionOverError
from agentrl.types.program import CallRefusedError, ModelReply

_RETRY_HEADERS = ("x-stainless-retry-count", "x-retry-count")
_IDEMPOTENCY_KEY = "idempotency-key"
# Two sub-agents may ask the very same at once; they are told apart by these alone.
_ASKERS = (_IDEMPOTENCY_KEY, "x-claude-code-agent-id", "thread-id")
_HANG_UP_S = 0.25
_HOW_TO_ANSWER = ("stream", "stream_options")


@dataclass(slots=True, eq=False)
class AnsweredCall:
    """One call: the reply in the making, whether a client was given the whole answer, and how many wait for it.

    `is_closed` says that the client closed the connection by which it got the answer, `is_broken_off` that it did so in
    a way in which no client does that has heard it.
    """

    id: str
    reply: asyncio.Task[ModelReply]
    is_heard: bool = False
    is_broken_off: bool = False
    is_closed: bool = False
    waiting: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether an answer is or will be there that nobody waits for, and nobody has surely heard."""
        return not self.waiting and (self.is_broken_off or not self.is_heard)

    @property
    def may_be_lost(self) -> bool:
        """Whether a client that says that it asks again may be the one that asked this."""
        return not self.waiting and (self.is_closed or not self.is_heard)

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
    by an earlier call with the same body whose answer nobody has heard or waits for, since few programs send a header;
    with one, also by an answer behind which the connection was closed. It may ask for a stream the first time and for a
    whole answer the second. The same asked twice at once is two calls.
    """

    def __init__(self, calls: ProgramCalls) -> None:
        self.calls = calls
        self.key = f"agentrl-{secrets.token_urlsafe(24)}"
        self._answered: defaultdict[str, list[AnsweredCall]] = defaultdict(list)
        self._tasks: set[asyncio.Task[ModelReply]] = set()

    async def begin(self, dialect: Dialect, body: bytes, headers: Mapping[str, str]) -> tuple[ReadCall, AnsweredCall]:
        """What a request asks for, and the call that it is, new or sent again.

        Waits for: a client that asked the same and may have lost the answer, or hung up. Unblocked by: a moment, in
        which that would be seen. Raises CallRefusedError.
        """
        try:
            read = dialect.read(body)
        except CallRefusedError:
            self.calls.begin()
            self.calls.count("refused")
            raise
        same = self._answered[_name_of(dialect, body, headers)]
        known = _lost(same)
        is_retry = any(headers.get(name, "0") != "0" for name in _RETRY_HEADERS)
        if known is None and (is_retry or any(call.waiting for call in same)):
            await asyncio.sleep(_HANG_UP_S)
            known = _lost(same) or (_maybe_lost(same) if is_retry else None)
        if known is None and _IDEMPOTENCY_KEY in headers:
            known = next((call for call in reversed(same) if not call.has_failed), None)
        if known is not None:
            self.calls.count("sent_again")
            known.is_broken_off = known.is_closed = False
            return read, known
        self.calls.begin()
        task = asyncio.create_task(self.calls.reply(read.call, dialect.echo, read.overrides), name="model-call")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        same.append(AnsweredCall(secrets.token_hex(12), task))
        return read, same[-1]

    def end(self) -> None:
        """Cancel what is in the making; counts the replies that no client has heard whole."""
        for call in itertools.chain.from_iterable(self._answered.values()):
            if call.reply.done() and not call.has_failed and not call.is_heard:
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


def _lost(same: Sequence[AnsweredCall]) -> AnsweredCall | None:
    return next((call for call in reversed(same) if not call.has_failed and call.is_lost), None)


def _maybe_lost(same: Sequence[AnsweredCall]) -> AnsweredCall | None:
    return next((call for call in reversed(same) if not call.has_failed and call.may_be_lost), None)
