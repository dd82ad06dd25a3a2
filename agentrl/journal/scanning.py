"""Where a segment's entries lie, found without decoding them: what an index is made of.

A million turns are three million frames, so the loop over them does as little as proves a frame: it unpacks the
header and the episode's key in one call and compares one checksum. Whatever is unusual goes to `read_frames`,
which also says why a frame is none.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from agentrl.journal.entries import KINDS, NO_EPISODE, NUMBERS, SCHEMA, Entry, Leased, unpack
from agentrl.journal.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from agentrl.journal.frames import MAGIC, MARK_KIND, Damage, Frame, Tear, read_frame, read_frames
from agentrl.journal.segments import HEADER_BYTES, SegmentHeader, damage_error, proven_end
from agentrl.types.errors import StorageError

# Magic, schema and kind as one number, the payload's length, the checksum, the key (signed, as SQLite has it).
_HEAD_AND_KEY = struct.Struct("<QIQq")
_HEAD_BYTES = 12
_AHEAD_BYTES = 2**18
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True)
class Scan:
    """What stands in a segment from one place on.

    `places` holds the starts of frames by episode's key (signed), `leased` the keys of leases among them, `buffer`
    the decoded entries of no single episode and their starts. `end` is the place up to which all was read; `tear`
    says why that is not the end of the file.
    """

    places: dict[int, array[int]] = field(default_factory=lambda: defaultdict(lambda: array("Q")))
    leased: list[int] = field(default_factory=list)
    buffer: list[tuple[int, Entry]] = field(default_factory=list)
    end: int = HEADER_BYTES
    tear: Tear | None = None


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

    def frame_at(self, start: int) -> Frame | Tear:
        """The frame that begins at a place, or why none does. Raises StorageError."""
        if self.header is None:
            return Tear(0, "the file has no header")
        at, identity = start - self._ahead_at, self.header.identity
        if at >= 0 and (frame := read_frame(identity, self._ahead, at, start)) is not None:
            return frame
        head = self._bytes_ahead(start, FRAME_HEADER_BYTES)
        data = self._bytes_ahead(start, FRAME_HEADER_BYTES + int.from_bytes(head[8:_HEAD_BYTES], "little"))
        piece = next(read_frames(identity, data, start), Tear(start, "the file ends here"))
        return Tear(start, piece.reason) if isinstance(piece, Damage) else piece

    def _bytes_ahead(self, start: int, count: int) -> bytes:
        """As `bytes_at`, out of a larger piece: neighbours cost no call each, nor other threads their turn."""
        offset = start - self._ahead_at
        if offset < 0 or offset + count > len(self._ahead):
            # What stands there may be damaged, and be any length but what the file has.
            self._ahead = self.bytes_at(start, max(min(count, self.size - start), _AHEAD_BYTES))
            self._ahead_at, offset = start, 0
        return self._ahead[offset : offset + count]

    def scan(self, start: int = HEADER_BYTES, buffer_limit: int | None = None) -> Scan:
        """Find what lies behind `start`; stops before an entry of no single episode at `buffer_limit` or behind it.

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
        data = self.bytes_at(start, max(0, self.size - start))
        try:
            return _scan(self.header.identity, data, start, buffer_limit, proven)
        except _DamagedError as error:
            raise damage_error(self.path, error.damage) from None

    def _without_header(self, proven: int) -> Scan:
        """The header is synced before anything is written behind it, so alone it is a torn tail."""
        if self.size > HEADER_BYTES or proven:
            raise damage_error(self.path, Damage(0, max(self.size, proven), "the header cannot be read"))
        return Scan(end=0, tear=Tear(0, "the file has no header"))


class _DamagedError(Exception):
    """Acknowledged bytes cannot be read."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage.reason)
        self.damage = damage


def _scan(identity: int, data: bytes, start: int, buffer_limit: int | None, proven: int) -> Scan:
    scan = Scan(end=start)
    places, base, at, stop = scan.places, identity + start, 0, len(data) - _HEAD_AND_KEY.size
    unpack_head, checksum_of = _HEAD_AND_KEY.unpack_from, xxhash.xxh3_64_intdigest
    while at <= stop:
        head, length, checksum, key = unpack_head(data, at)
        end = at + FRAME_HEADER_BYTES + length
        signed = data[at : at + _HEAD_BYTES] + data[at + FRAME_HEADER_BYTES : end]
        if head not in _KNOWN_HEADS or checksum_of(signed, (base + at) & _MASK) != checksum:
            break
        if head == _MARK_HEAD:
            pass
        elif key != NO_EPISODE:
            places[key].append(start + at)
            if head in _LEASES:
                scan.leased.append(key)
        elif buffer_limit is not None and start + at >= buffer_limit:
            scan.end = start + at
            return scan
        else:
            scan.buffer.append((start + at, unpack(head >> 16 & 0xFFFF, head >> 32, signed[_HEAD_BYTES:])))
        at = end
    scan.end = start + at
    scan.tear = _explain(identity, memoryview(data)[at:], start + at, proven)
    return scan


def _explain(identity: int, rest: memoryview, at: int, proven: int) -> Tear | None:
    """Why no known entry begins here; None at the file's end.

    Raises:
        StorageError: an entry of a newer program does.
        _DamagedError: one did that was acknowledged.
    """
    piece = next(read_frames(identity, rest, at, proven), None)
    if isinstance(piece, Damage):
        raise _DamagedError(piece)
    if isinstance(piece, Frame):
        unpack(piece.schema, piece.kind, piece.payload)
        raise StorageError(f"a journal entry of kind {piece.kind} has no episode's key")
    return piece


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"journal segment {path} cannot be read: {error}")


_MARK_HEAD = MAGIC | MARK_KIND << 32
_ENTRY_HEADS = frozenset(MAGIC | schema << 16 | kind << 32 for schema in range(SCHEMA + 1) for kind in KINDS)
_KNOWN_HEADS = _ENTRY_HEADS | {_MARK_HEAD}
_LEASES = frozenset(head for head in _ENTRY_HEADS if head >> 32 == NUMBERS[Leased])
