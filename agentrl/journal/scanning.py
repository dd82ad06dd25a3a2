"""Where a segment's entries lie, found without decoding those of single episodes: what an index is made of."""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.journal.entries import KINDS, NO_EPISODE, NUMBERS, SCHEMA, Entry, Leased, key_of, unpack
from agentrl.journal.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from agentrl.journal.frames import Corruption, Frame, TornTail, read_frames
from agentrl.journal.segments import HEADER_BYTES, SegmentHeader, corruption_error, proven_end
from agentrl.types.errors import StorageError

_LEASED = NUMBERS[Leased]
_LENGTH = slice(8, 12)  # of the payload, in a frame's header
_AHEAD_BYTES = 2**18


@dataclass(slots=True)
class Scan:
    """What stands in a segment.

    `places` holds the starts of frames by episode's key, `leased` the keys of leases among them, `buffer`
    the decoded entries of no single episode and their starts. `end` is the place up to which all was read; `torn_tail`
    says why that is not the end of the file.
    """

    places: dict[int, array[int]] = field(default_factory=lambda: defaultdict(lambda: array("Q")))
    leased: list[int] = field(default_factory=list)
    buffer: list[tuple[int, Entry]] = field(default_factory=list)
    end: int = HEADER_BYTES
    torn_tail: TornTail | None = None

    def add(self, frame: Frame, buffer_limit: int | None) -> bool:
        """Take in an entry, unless it is of no single episode and at the limit or behind it; whether it was taken in.

        Raises:
            StorageError: it is of a newer program.
        """
        key = key_of(frame.payload)
        is_known = frame.kind in KINDS and frame.schema <= SCHEMA
        if key != NO_EPISODE and is_known:
            self.places[key].append(frame.start)
            if frame.kind == _LEASED:
                self.leased.append(key)
            return True
        if buffer_limit is not None and frame.start >= buffer_limit and is_known:
            return False
        self.buffer.append((frame.start, unpack(frame.schema, frame.kind, frame.payload)))
        return True


class SegmentReader:
    """A segment that may still grow; reads by place and not through a mapping. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError if the file cannot be read or is of a newer format."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _unreadable(path, error) from error
        self._ahead, self._ahead_at = b"", 0
        self.header = SegmentHeader.of(self.bytes_at(0, HEADER_BYTES), path)

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file up."""
        os.close(self._descriptor)

    @property
    def size(self) -> int:
        """Bytes that the file has now."""
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        """Let what was read outlive a loss of power, whoever wrote it. Raises StorageError."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def bytes_at(self, start: int, count: int) -> bytes:
        """Up to `count` bytes from a place on. Raises StorageError."""
        pieces, end = [], start + count
        try:
            while start < end and (piece := os.pread(self._descriptor, end - start, start)):
                pieces.append(piece)
                start += len(piece)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def frame_at(self, start: int) -> Frame | TornTail:
        """The frame that begins at a place, or why none does. Raises StorageError."""
        if self.header is None:
            return TornTail(0, "the file has no header")
        head = self._bytes_ahead(start, FRAME_HEADER_BYTES)
        data = self._bytes_ahead(start, FRAME_HEADER_BYTES + int.from_bytes(head[_LENGTH], "little"))
        piece = next(read_frames(self.header.identity, data, start), TornTail(start, "the file ends here"))
        return TornTail(start, piece.reason) if isinstance(piece, Corruption) else piece

    def _bytes_ahead(self, start: int, count: int) -> bytes:
        """As `bytes_at`, out of a larger piece: neighbours cost no call each, nor other threads their turn."""
        offset = start - self._ahead_at
        if offset < 0 or offset + count > len(self._ahead):
            # What stands there may be damaged, and be any length but what the file has.
            self._ahead = self.bytes_at(start, max(min(count, self.size - start), _AHEAD_BYTES))
            self._ahead_at, offset = start, 0
        return self._ahead[offset : offset + count]

    def scan(self, buffer_limit: int | None = None) -> Scan:
        """Find all that lies here; stops before an entry of no single episode at `buffer_limit` or behind it.

        Raises:
            StorageError: the file cannot be read, has lost acknowledged bytes, or an entry is of a newer program.
        """
        try:
            # Before the bytes are read, since its writer may go on meanwhile.
            proven = proven_end(self.path, self.header)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if self.header is None:
            return self._without_header(proven)
        data = self.bytes_at(HEADER_BYTES, self.size - HEADER_BYTES)
        scan = Scan(end=HEADER_BYTES + len(data))
        for piece in read_frames(self.header.identity, data, HEADER_BYTES, proven):
            if isinstance(piece, Corruption):
                raise corruption_error(self.path, piece)
            if isinstance(piece, TornTail):
                scan.torn_tail, scan.end = piece, piece.at
            elif not scan.add(piece, buffer_limit):
                scan.end = piece.start
                break
        return scan

    def _without_header(self, proven: int) -> Scan:
        """The header is synced before anything is written behind it, so alone it is a torn tail."""
        if self.size > HEADER_BYTES or proven:
            raise corruption_error(self.path, Corruption(0, max(self.size, proven), "the header cannot be read"))
        return Scan(end=0, torn_tail=TornTail(0, "the file has no header"))


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"journal segment {path} cannot be read: {error}")
