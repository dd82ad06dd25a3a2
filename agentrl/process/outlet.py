"""The writing end of a socket for messages too large to be sent by an event loop, which a thread sends."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

_POLL_MS = 1000


class Outlet:
    """Sends over a socket that an event loop reads from, and that it writes to only while nothing is sent here.

    `close` ends a message on its way, since a process that died takes no more of it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection.dup()
        self._sending = threading.Lock()
        self._is_closed = False

    def send(self, *parts: bytes) -> None:
        """Send the parts one behind the other. Waits for: the reader. Unblocked by: it, its end, or `close`.

        Raises:
            ConnectionError: the other end is gone, or this one has been closed.
        """
        with self._sending:
            if self._is_closed:
                raise ConnectionAbortedError("the socket was closed")
            for part in parts:
                self._send(memoryview(part))

    def close(self) -> None:
        """Nothing is sent any more; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):  # the other end may have been first
            self._socket.shutdown(socket.SHUT_WR)
        with self._sending:
            self._socket.close()

    def _send(self, rest: memoryview) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while rest:
            if self._is_closed:
                raise ConnectionAbortedError("the socket was closed")
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                writable.poll(_POLL_MS)
