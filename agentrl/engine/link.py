"""Messages between an engine's front, which speaks HTTP, and the process that computes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

_HEAD = struct.Struct("<QIII")


class Kind(IntEnum):
    """What a message says; the first of each line is the front's, the others are answers to it."""

    CALL, ANSWER, PIECE = 1, 2, 3
    TAKEN, HANGUP = 4, 5
    READY = 6


@dataclass(frozen=True, slots=True)
class Message:
    """One message about the call of that number.

    A call's `note` is its authorization, a line's end, method and path; an answer's is its status. A streamed answer
    comes in pieces, each once the one before it was `TAKEN` by the client, with an empty answer behind them. `HANGUP`
    says that the client is gone; its answer is still due. `READY` is the engine's word that it can be called.

    Example: ``Message(Kind.CALL, 7, "Bearer secret\\nPOST /pause_generation", b"{}")``.
    """

    kind: Kind
    call: int = 0
    note: str = ""
    body: bytes = b""


class Link(asyncio.Protocol):
    """One end of the socket between both; tells of each message, and of the other end's death."""

    def __init__(self, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.WriteTransport, transport)  # of uvloop, which derives from none of these

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._received += data
        for message in take_messages(self._received):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        self._on_end()

    def send(self, message: Message) -> None:
        """Say something, unless nobody is there any more. Never waits: what is unsent is kept."""
        if self._transport is not None:
            self._transport.writelines(encoded(message))

    def close(self) -> None:
        """Say no more; safe to call twice."""
        if self._transport is not None:
            self._transport.close()


def encoded(message: Message) -> tuple[bytes, bytes]:
    """A message's bytes in two pieces, the second of which is its body, not copied."""
    note = message.note.encode()
    return _HEAD.pack(len(message.body), len(note), message.call, message.kind) + note, message.body


def take_messages(received: bytearray) -> Iterator[Message]:
    """Take the messages that are complete away from the beginning of what was received."""
    while len(received) >= _HEAD.size:
        num_body, num_note, call, kind = _HEAD.unpack_from(received)
        behind_note = _HEAD.size + num_note
        end = behind_note + num_body
        if len(received) < end:
            return
        with memoryview(received) as view:
            note, body = str(view[_HEAD.size : behind_note], "utf-8"), bytes(view[behind_note:end])
        del received[:end]
        yield Message(Kind(kind), call, note, body)
