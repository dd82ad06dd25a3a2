"""The native protocol by WebSocket: a bare ASGI application, since each step of each episode passes here."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec

import agentrl
from agentrl import codec
from agentrl.envs.wire import PROTOCOL, VERSION, Answer, Call, Hello, ServerBusyError
from agentrl.serving.board import Number
from agentrl.serving.table import SessionTable
from agentrl.types.errors import Boundary, EpisodeError, Failure, boundary

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_log = logging.getLogger(__name__)


class Answering(Protocol):
    """Carries calls out, here or in another process."""

    async def answer(self, call: Call) -> object:
        """What the call gives. Raises EpisodeError."""


class NativeEndpoint:
    """Answers the calls of one connection after the other."""

    def __init__(self, table: SessionTable, calls: Answering, max_message_bytes: int) -> None:
        self._table, self._calls = table, calls
        self._max_message_bytes = max_message_bytes
        self._from_json = msgspec.json.Decoder(Call)
        self._from_msgpack = msgspec.msgpack.Decoder(Call)

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """One connection.

        Waits for: its calls. Unblocked by: these, its end, or the pings that it leaves unanswered.
        """
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": codec.to_json(self._hello()).decode()})
        while (event := await receive())["type"] == "websocket.receive":
            try:
                await send(await self._reply(event))
            except OSError:  # the client is gone; what it asked for is kept for the next connection
                return

    def _hello(self) -> Hello:
        return Hello(
            PROTOCOL,
            VERSION,
            agentrl.__version__,
            self._table.board.worker,
            tuple(self._table.hosts),
            self._table.free,
            self._max_message_bytes,
        )

    async def _reply(self, event: Event) -> Event:
        text = event.get("text")
        if text is not None:
            answer = await self._answer(self._from_json, text)
            return {"type": "websocket.send", "text": _encoded(codec.to_json, answer).decode()}
        answer = await self._answer(self._from_msgpack, event["bytes"])
        return {"type": "websocket.send", "bytes": _encoded(codec.encode, answer)}

    async def _answer(self, decoder: msgspec.json.Decoder[Call] | msgspec.msgpack.Decoder[Call], data: Any) -> Answer:
        try:
            call = decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeError) as error:
            return Answer("", failure=Failure(Boundary.CONTRACT, "protocol", f"not a call of this protocol: {error}"))
        try:
            return Answer(call.id, await self._calls.answer(call))
        except ServerBusyError as error:
            return Answer(call.id, failure=error.failure, retry_after_s=error.retry_after_s)
        except EpisodeError as error:
            self._table.board.add(Number.FAILED)
            return Answer(call.id, failure=error.failure)


def _encoded(encode: Callable[[object], bytes], answer: Answer) -> bytes:
    """An answer's bytes; one that cannot be encoded is the environment's fault, and that is the answer."""
    try:
        with boundary(Boundary.ENVIRONMENT, "answer", "its answer cannot be sent"):
            return encode(answer)
    except EpisodeError as error:
        return encode(Answer(answer.id, failure=error.failure))
