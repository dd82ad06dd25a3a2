"""The connections of the gateway's clients, and what they tell of whether an answer was heard.

What was written is not yet heard. A client that has heard an answer uses its connection again, or keeps it; one that
loses a stream, or leaves it in the middle, closes it. Simple clients close it behind each whole answer as well.
"""

from __future__ import annotations

import asyncio
import select
from enum import StrEnum

from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

# Pools close connections that nobody has used for a while; the shortest known while is Node's, of four seconds. It is
# counted in turns of the event loop, so that one that was held up takes nothing for idle that it has not looked at.
_IDLE_TURNS, _IDLE_TURN_S = 35, 0.1


class Hearing(StrEnum):
    """What is known of whether a client has heard its answer.

    `OPEN`: it waits, or has it and may yet turn out to have lost it. `HEARD`: it went on with its connection.
    `CLOSED`: it closed it behind the answer, in a way in which clients do too that have heard it. `LOST`: it was gone
    before the whole answer was sent, or broke it off.
    """

    OPEN = "open"
    HEARD = "heard"
    CLOSED = "closed"
    LOST = "lost"


class Listener:
    """The client of one request, who is to hear the answer.

    `is_streamed` says that it asked for a stream, `is_answered` that the whole answer was written.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._is_idle = False
        self.is_streamed = self.is_answered = False
        self.hearing = Hearing.OPEN

    def ensure_there(self) -> None:
        """Raises ClientDisconnect if it is gone, or has closed and the event loop has yet to learn of it."""
        if self.hearing is Hearing.OPEN and not self._transport.is_closing():
            poll = select.poll()
            poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
            if not poll.poll(0):
                return
        self.hearing = Hearing.LOST
        raise ClientDisconnect

    def answer(self) -> None:
        """Note that the whole answer was written."""
        if self.hearing is Hearing.OPEN:
            self.is_answered = True
            self._stay(_IDLE_TURNS)

    def go_on(self) -> None:
        """Note that it asks for something else on the same connection."""
        self.hearing = Hearing.HEARD

    def close(self, is_broken: bool) -> None:
        """Note that it closed its connection, broken in a way in which nobody closes that has heard the answer."""
        if not self.is_answered or is_broken or self.hearing is Hearing.LOST:
            self.hearing = Hearing.LOST
        elif self._is_idle:
            self.hearing = Hearing.HEARD
        else:
            self.hearing = Hearing.LOST if self.is_streamed else Hearing.CLOSED

    def dismiss(self) -> None:
        """Note that the server has closed the connection."""
        if self.hearing is Hearing.OPEN:
            self.hearing = Hearing.CLOSED if self.is_answered else Hearing.LOST

    def _stay(self, turns: int) -> None:
        """The connection is kept, and becomes idle if it is for so many turns more."""
        if not turns:
            self._is_idle = True
        elif self.hearing is Hearing.OPEN:
            asyncio.get_running_loop().call_later(_IDLE_TURN_S, self._stay, turns - 1)


class Connection(H11Protocol):
    """A client's connection, which gives each of its requests a `Listener` and notes what becomes of it."""

    _listener: Listener | None = None

    def handle_events(self) -> None:
        """Bytes have come, perhaps of another request."""
        before = self.scope
        super().handle_events()
        if self.scope is not before:
            if self._listener is not None:
                self._listener.go_on()
            self._listener = self.scope["state"]["listener"] = Listener(self.transport)

    def on_response_complete(self) -> None:
        """The whole answer was written."""
        if self._listener is not None:
            self._listener.answer()
        super().on_response_complete()

    def eof_received(self) -> None:
        """The client has closed."""
        if self._listener is not None:
            self._listener.close(is_broken=self.transport.get_write_buffer_size() > 0)
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, by an error where there is one."""
        if self._listener is not None and exc is not None:
            self._listener.close(is_broken=True)
        elif self._listener is not None:
            self._listener.dismiss()
        super().connection_lost(exc)
