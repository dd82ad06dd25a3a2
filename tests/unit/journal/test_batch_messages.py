"""How batches come to the process that writes a journal."""

from __future__ import annotations

import socket
import threading

import pytest

from agentrl.journal.appender_process import LENGTH, receive


def _received(*pieces: bytes, buffer_bytes: int = 32) -> list[bytes | None]:
    """What comes of two calls, if these bytes are sent one after the other and nothing behind them."""
    ours, theirs = socket.socketpair()
    buffer = bytearray(buffer_bytes)

    def send() -> None:
        for piece in pieces:
            theirs.sendall(piece)
        theirs.close()

    sending = threading.Thread(target=send)
    with ours:
        sending.start()
        messages = [None if (view := receive(ours, buffer)) is None else bytes(view) for _ in range(2)]
        sending.join()
    return messages


@pytest.mark.parametrize("size", [0, 1, 24, 25, 300_000])
def test_a_message_may_be_longer_than_the_buffer(size: int) -> None:
    message = bytes(number % 251 for number in range(size))
    assert _received(LENGTH.pack(size) + message) == [message, None]


def test_a_message_may_come_byte_by_byte() -> None:
    data = LENGTH.pack(40) + bytes(range(40))
    assert _received(*(data[place : place + 1] for place in range(len(data)))) == [bytes(range(40)), None]


@pytest.mark.parametrize("size", [3, 8, 20])
def test_a_message_that_breaks_off_is_none(size: int) -> None:
    assert _received((LENGTH.pack(40) + bytes(40))[:size]) == [None, None]


def test_a_long_message_leaves_the_buffer_as_long_as_it_was() -> None:
    ours, theirs = socket.socketpair()
    buffer = bytearray(16)
    with ours, theirs:
        theirs.sendall(LENGTH.pack(100) + bytes(100))
        assert receive(ours, buffer) == bytes(100)
        theirs.sendall(LENGTH.pack(3) + b"end")
        assert receive(ours, buffer) == b"end"
    assert len(buffer) == 16
