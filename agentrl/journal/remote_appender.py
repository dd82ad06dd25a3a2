"""The run's side of an appender in a process of its own, whose side is `agentrl.journal.appender_process`.

Between a thread that syncs and an event loop that plays episodes the interpreter changes hands several times for every
sync, and each waits for it. A process has one of its own.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import suppress

import msgspec

from agentrl.journal.appender import Entries, Then
from agentrl.journal.appender_process import LENGTH, Reply
from agentrl.journal.claim import Claim
from agentrl.journal.reach import SegmentEnd
from agentrl.process.remote import how_it_ended, spawn
from agentrl.types.errors import StorageError

_REPLY_BYTES = 1 << 12  # a longer reply comes in several pieces; a buffer for a whole one costs more than the rest
_EXIT_S = 5.0
_EXIT_CODE_S = 1.0


class AppenderProcess:
    """The run's side: a batch goes out and its answer comes in without a thread.

    `process` is None before the first batch.
    """

    def __init__(self, claim: Claim, name: str) -> None:
        self._claim, self._name = claim, name
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._loop: asyncio.AbstractEventLoop
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._then: Then | None = None
        self._end_error: StorageError | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a batch is under way."""
        return self._then is not None

    def post(self, entries: Entries, then: Then) -> None:
        """Send a batch; the first one starts the process. Raises StorageError if it cannot be started, or has ended."""
        assert not self.is_writing, "one batch at a time"
        if self._end_error is not None:
            raise self._end_error
        if self.process is None:
            self._start()
        self._then = then
        batch = bytearray()
        self._encoder.encode_into(entries, batch, LENGTH.size)
        LENGTH.pack_into(batch, 0, len(batch) - LENGTH.size)
        self._unsent = memoryview(batch)
        if not self._has_sent_all():
            self._loop.add_writer(self._socket, self._go_on_sending)

    async def close(self, is_stuck: bool) -> None:
        """Let the process end, or kill it if its disk does not answer.

        Waits for: its end. Unblocked by: that, or a deadline after which it is killed.
        """
        if self._end_error is None:
            self._end_error = StorageError(f"journal {self._claim.folder} is closed")
            if self.process is not None:
                self._forget()
        if self.process is None:
            return
        self._socket.close()
        if is_stuck:
            self.process.kill()  # it ends once the disk lets it, and nobody waits for that
            return
        try:
            await asyncio.to_thread(self.process.wait, _EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _start(self) -> None:
        """On the event loop's thread, whose end the process takes for the run's."""
        argv = ["-m", "agentrl.journal.appender_process", str(self._claim.folder), self._name, str(self._claim.token)]
        try:
            self.process, self._socket = spawn(argv)
        except OSError as error:
            raise StorageError(
                f"the process that writes journal {self._claim.folder} cannot be started: {error}; "
                "allow more processes and open files (`ulimit -u`, `ulimit -n`), or free memory"
            ) from error
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)

    def _forget(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)

    def _go_on_sending(self) -> None:
        if self._has_sent_all():
            self._loop.remove_writer(self._socket)

    def _has_sent_all(self) -> bool:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:  # the process is gone, of which the other direction tells
            self._unsent = memoryview(b"")
        if not self._unsent:
            self._unsent = memoryview(b"")  # the slice would keep the batch
        return not self._unsent

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_REPLY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        if not data:
            self._forget()
            self._end_error = self._death()
            self._answer(None, self._end_error)
        elif (body := self._whole_reply()) is not None:
            reply = msgspec.msgpack.decode(body, type=Reply)
            self._received.clear()
            error = None if reply.error is None else StorageError(reply.error)
            self._answer(SegmentEnd(reply.name, reply.end_bytes), error)

    def _whole_reply(self) -> bytes | None:
        """There is one at a time."""
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        body = bytes(self._received[LENGTH.size :])
        return body if len(body) == length else None

    def _death(self) -> StorageError:
        assert self.process is not None, "what has not been started has not ended"
        with suppress(subprocess.TimeoutExpired):  # its exit code comes a moment behind the end of its socket
            self.process.wait(_EXIT_CODE_S)
        return StorageError(
            f"process {self.process.pid}, which writes journal {self._claim.folder}, has ended "
            f"({how_it_ended(self.process)}); what was acknowledged is kept: `agentrl resume`"
        )

    def _answer(self, end: SegmentEnd | None, error: BaseException | None) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(end, error)
