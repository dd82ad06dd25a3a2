"""An appender in a process of its own: ``python -m agentrl.journal.appender_process FD PARENT FOLDER NAME TOKEN``.

Between a thread that syncs and an event loop that plays episodes the interpreter changes hands several times for every
sync, and each waits for it. A process has one of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from agentrl.journal.appender import Entries, SegmentAppender, Then
from agentrl.journal.claim import Claim
from agentrl.journal.reach import SegmentEnd
from agentrl.process.crash_points import take_along
from agentrl.process.parent import attended_environment, die_with_parent
from agentrl.types.errors import StorageError

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20
_EXIT_S = 5.0


class Reply(msgspec.Struct, array_like=True):
    """How far the journal is durable, or why it is not."""

    name: str = ""
    end_bytes: int = 0
    error: str | None = None


class AppenderProcess:
    """The run's side: a batch goes out and its answer comes in without a thread."""

    def __init__(self, claim: Claim, name: str) -> None:
        self._claim, self._name = claim, name
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._loop: asyncio.AbstractEventLoop
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._then: Then | None = None
        self._is_over = False

    @property
    def pid(self) -> int | None:
        """Process id; None before the first batch."""
        return None if self._process is None else self._process.pid

    def post(self, entries: Entries, then: Then) -> None:
        """Send a batch; the first one starts the process.

        Raises:
            RuntimeError: it cannot be started.
            StorageError: it has ended.
        """
        if self._process is None:
            self._start()
        if self._is_over:
            raise self._death()
        self._then = then
        data = msgspec.msgpack.encode(entries)
        self._unsent = memoryview(_LENGTH.pack(len(data)) + data)
        self._send()

    async def close(self, is_stuck: bool) -> None:
        """Let the process end, or kill it if its disk does not answer."""
        process, self._process = self._process, None
        if process is None:
            return
        self._forget()
        self._socket.close()
        if is_stuck:
            process.kill()  # it ends once the disk lets it, and nobody waits for that
            return
        try:
            await asyncio.to_thread(process.wait, _EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def _start(self) -> None:
        """On the event loop's thread, whose end the process takes for the run's."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "agentrl.journal.appender_process", str(theirs.fileno()), str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    [*command, str(self._claim.folder), self._name, str(self._claim.token)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, **attended_environment()},
                )
            except OSError as error:
                raise RuntimeError(f"the process that writes cannot be started: {error}") from error
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)

    def _forget(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return  # the process is gone, of which the other direction tells
        if self._unsent:
            self._loop.add_writer(self._socket, self._send)
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data:
            self._is_over = True
            self._forget()
            self._end(None, self._death())
        elif (body := self._whole_reply()) is not None:
            reply = msgspec.msgpack.decode(body, type=Reply)
            self._received.clear()
            error = None if reply.error is None else StorageError(reply.error)
            self._end(SegmentEnd(reply.name, reply.end_bytes), error)

    def _whole_reply(self) -> bytes | None:
        """There is one at a time."""
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        body = bytes(self._received[_LENGTH.size :])
        return body if len(body) == length else None

    def _death(self) -> StorageError:
        return StorageError(
            f"process {self.pid}, which writes journal {self._claim.folder}, has ended; "
            "what was acknowledged is kept: `agentrl resume`"
        )

    def _end(self, end: SegmentEnd | None, error: BaseException | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(end, error)


def _answer(appender: SegmentAppender, request: Any) -> Reply:
    try:
        end = appender.append(request)
    except StorageError as error:
        return Reply(error=str(error))
    return Reply(end.name, end.end_bytes)


def _serve(connection: socket.socket, appender: SegmentAppender) -> None:
    """Waits for: batches. Unblocked by: them, or the run's end."""
    decoder = msgspec.msgpack.Decoder(Entries)
    while (header := connection.recv(_LENGTH.size, socket.MSG_WAITALL)) and len(header) == _LENGTH.size:
        (length,) = _LENGTH.unpack(header)
        request = connection.recv(length, socket.MSG_WAITALL)
        if len(request) < length:
            return
        reply = msgspec.msgpack.encode(_answer(appender, decoder.decode(request)))
        connection.sendall(_LENGTH.pack(len(reply)) + reply)


def main() -> None:
    """Entry of the process."""
    descriptor, parent, folder, name, token = sys.argv[1:]
    # What a terminal or a cluster sends to all processes of a run is for the run: it parks what this one writes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    take_along(int(parent))
    claim = Claim(Path(folder), int(token))
    with socket.socket(fileno=int(descriptor)) as connection:
        _serve(connection, SegmentAppender(claim.folder, name, check_right=claim.check))


if __name__ == "__main__":
    main()
