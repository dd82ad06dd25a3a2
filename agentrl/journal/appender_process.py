"""A process that appends to a journal: ``python -m agentrl.journal.appender_process FOLDER NAME TOKEN FD``.

It answers batches of entries on a socket, one at a time, for `agentrl.journal.remote_appender`. Whatever it does
between two syncs it does with cold caches, and engines and trainer wait for the processor meanwhile: a batch is one
call to receive and copied nowhere, and nothing is imported that it does not need.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from agentrl.journal.appender import Entries, SegmentAppender
from agentrl.journal.claim import Claim
from agentrl.journal.segments import REMEDY
from agentrl.process.crash_points import take_along
from agentrl.process.parent import die_with_parent, leave_stopping_to_parent
from agentrl.types.errors import StorageError

LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 1 << 18


class Reply(msgspec.Struct, array_like=True):
    """How far the journal is durable, or why it is not."""

    name: str = ""
    end_bytes: int = 0
    error: str | None = None


def receive(connection: socket.socket, buffer: bytearray) -> memoryview | None:
    """A message behind its length, in `buffer` if it fits; None at the other side's end.

    The other side sends nothing before it is answered, so one call takes all of a message that came in one piece.
    Waits for: a message. Unblocked by: it, or that end.
    """
    view, filled, end = memoryview(buffer), 0, 0
    while not end or filled < end:
        count = connection.recv_into(view[filled:])
        if count == 0:
            return None
        filled += count
        if not end and filled >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(view)[0]
            if end > len(view):
                longer = memoryview(bytearray(end))
                longer[:filled], view = view[:filled], longer
    return view[LENGTH.size : end]


def _append(appender: SegmentAppender, folder: Path, request: Any) -> Reply:
    try:
        end = appender.append(request)
    except StorageError as error:
        return Reply(error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the run is the one to end by it
        return Reply(error=f"journal {folder} cannot be written: {error!r}; {REMEDY}")
    return Reply(end.name, end.end_bytes)


def _serve(connection: socket.socket, appender: SegmentAppender, folder: Path) -> None:
    """Waits for: batches. Unblocked by: them, or the run's end."""
    decoder, encoder = msgspec.msgpack.Decoder(Entries), msgspec.msgpack.Encoder()
    buffer = bytearray(_BUFFER_BYTES)
    while (request := receive(connection, buffer)) is not None:
        reply = encoder.encode(_append(appender, folder, decoder.decode(request)))
        connection.sendall(LENGTH.pack(len(reply)) + reply)


def main() -> None:
    """Entry of the process."""
    folder, name, token, descriptor = sys.argv[1:]
    leave_stopping_to_parent()
    die_with_parent()
    take_along(os.getppid())
    claim = Claim(Path(folder), int(token))
    with socket.socket(fileno=int(descriptor)) as connection:
        _serve(connection, SegmentAppender(claim.folder, name, check_right=claim.check), claim.folder)


if __name__ == "__main__":
    main()
