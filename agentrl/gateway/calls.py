"""The calls of one session that are answered or in the making, so that one that is sent again is answered once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.gateway.dialects import Dialect, ReadCall
from agentrl.rollouts.programs import ProgramCalls, SessionOverError
from agentrl.types.program import CallRefusedError, ModelReply

_RETRY_HEADERS = ("x-stainless-retry-count", "x-retry-count")
_IDEMPOTENCY_KEY = "idempotency-key"
# Two sub-agents may ask the very same at once; they are told apart by these alone.
_ASKERS = (_IDEMPOTENCY_KEY, "x-claude-code-agent-id", "thread-id")
_HOW_TO_ANSWER = ("stream", "stream_options")


@dataclass(slots=True)
class AnsweredCall:
    """One call: the reply in the making, and whether a client has heard the whole answer."""

    id: str
    reply: asyncio.Task[ModelReply]
    is_heard: bool = False

    async def answer(self) -> ModelReply:
        """The reply, which goes on being made if the caller is cancelled. Raises CallRefusedError."""
        await asyncio.wait([self.reply])
        if self.reply.cancelled():
            raise SessionOverError("its program has ended")
        return self.reply.result()


class Session:
    """The calls of one episode's programs.

    A client whose answer was lost sends its call again: that is not another call, but gets the same answer. It is known
    by its header, or by an earlier call with the same body whose answer nobody has heard: few programs send a header.
    It may ask for a stream the first time and for a whole answer the second.
    """

    def __init__(self, calls: ProgramCalls) -> None:
        self.calls = calls
        self.key = f"agentrl-{secrets.token_urlsafe(24)}"
        self._answered: dict[str, AnsweredCall] = {}
        self._tasks: set[asyncio.Task[ModelReply]] = set()

    def begin(self, dialect: Dialect, body: bytes, headers: Mapping[str, str]) -> tuple[ReadCall, AnsweredCall]:
        """What a request asks for, and the call that it is, new or sent again. Raises CallRefusedError."""
        try:
            read = dialect.read(body)
        except CallRefusedError:
            self.calls.begin()
            self.calls.count("refused")
            raise
        name = _name_of(dialect, body, headers)
        known = self._answered.get(name)
        if known is not None and not _has_failed(known) and (_is_retry(headers) or not known.is_heard):
            self.calls.count("sent_again")
            return read, known
        self.calls.begin()
        task = asyncio.create_task(self.calls.reply(read.call, dialect.echo, read.overrides), name="model-call")
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        call = self._answered[name] = AnsweredCall(secrets.token_hex(12), task)
        return read, call

    def end(self) -> None:
        """Cancel what is in the making; counts the replies that no client has heard whole."""
        for call in self._answered.values():
            if call.reply.done() and not _has_failed(call) and not call.is_heard:
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


def _is_retry(headers: Mapping[str, str]) -> bool:
    return _IDEMPOTENCY_KEY in headers or any(headers.get(name, "0") != "0" for name in _RETRY_HEADERS)


def _has_failed(call: AnsweredCall) -> bool:
    return call.reply.done() and (call.reply.cancelled() or call.reply.exception() is not None)
