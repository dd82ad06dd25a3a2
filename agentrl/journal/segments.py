"""Segment files of a journal: one writer each, appended to, synced, never changed.

A segment begins with a header that names format, number and a random identity, which every frame's checksum
includes, and says how much of its predecessor was durable, so that nothing is lost there unnoticed. Each start of
a writer opens a segment of its own (created exclusively, its folder synced), so a torn tail stays where a crash
left it and is cut by whoever reads; nothing is locked or mapped, and shared storage serves as well as a local disk.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from agentrl.journal.disk import DISK, Disk, write_all
from agentrl.journal.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from agentrl.journal.frames import (
    Corruption,
    Frame,
    TornTail,
    find_identity,
    frame_bytes,
    mark_bytes,
    payload_bytes,
    read_frames,
)
from agentrl.types.errors import StorageError

FORMAT = 1
_MAGIC = b"AGRLJRNL"
_HEADER = struct.Struct("<8sIIQQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_AHEAD_BYTES = 2**18
REMEDY = "free space there or repair the disk, then start again: what was acknowledged is kept"


@dataclass(frozen=True, slots=True)
class Durable:
    """Up to which byte a segment is known to have been synced."""

    identity: int
    end: int


NOTHING = Durable(0, 0)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself, and of the one before it.

    Example: ``SegmentHeader(1, 7, 0x5A..., Durable(0x33..., 4096))`` is the seventh of its writer; the sixth has 4096
    bytes. The identity tells it from a segment of another run that bore its name.
    """

    format: int
    number: int
    identity: int
    before: Durable = NOTHING

    @property
    def whole_bytes(self) -> int:
        """How long the segment is, of one that was written at once and says so of itself; 0 for others."""
        return self.before.end if self.before.identity == self.identity else 0

    def to_bytes(self) -> bytes:
        """The header as it stands at the start of the file."""
        head = _HEADER.pack(_MAGIC, self.format, self.number, self.identity, self.before.identity, self.before.end)
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))

    @classmethod
    def of(cls, data: bytes, where: Path) -> SegmentHeader | None:
        """The header at the start of a file; None if the file was not yet one when its writer died.

        Raises:
            StorageError: written by a newer program.
        """
        if len(data) < HEADER_BYTES:
            return None
        head, (checksum,) = data[: _HEADER.size], _CHECKSUM.unpack_from(data, _HEADER.size)
        magic, version, number, identity, identity_before, end_before = _HEADER.unpack(head)
        if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(head):
            return None
        if version > FORMAT:
            raise StorageError(
                f"{where} has journal format {version}, this program knows {FORMAT}; install a newer one"
            )
        return cls(version, number, identity, Durable(identity_before, end_before))


class SegmentFile:
    """A segment that is being written; its calls block, and come from one thread at a time."""

    def __init__(self, path: Path, header: SegmentHeader, descriptor: int, disk: Disk = DISK) -> None:
        self.path, self.header = path, header
        self._descriptor, self._disk = descriptor, disk
        self.size = HEADER_BYTES
        self.durable = Durable(header.identity, HEADER_BYTES)

    @classmethod
    def create(cls, path: Path, number: int, disk: Disk = DISK, before: Durable = NOTHING) -> SegmentFile:
        """Make the file and let it outlive a loss of power. Raises StorageError, also if there is such a file."""
        header = SegmentHeader(FORMAT, number, secrets.randbits(64), before)
        try:
            descriptor = disk.create(path)
        except FileExistsError:
            raise StorageError(
                f"journal segment {path} cannot be made: another process has just made it; one run at a time"
            ) from None
        except OSError as error:
            raise StorageError(f"journal segment {path} cannot be made: {error}; {REMEDY}") from error
        try:
            write_all(disk, descriptor, header.to_bytes())
            disk.sync(descriptor)
            disk.sync_folder(path.parent)
        except OSError as error:
            disk.close(descriptor)
            raise StorageError(f"journal segment {path} cannot be made: {error}; {REMEDY}") from error
        return cls(path, header, descriptor, disk)

    def append(self, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Write entries of schema, kind and payload in one go; durable after `sync`. Raises StorageError."""
        pieces: list[bytes] = []
        at = self.size
        for schema, kind, payload in entries:
            pieces.append(frame_bytes(self.header.identity, at, schema, kind, payload))
            at += len(pieces[-1])
        self._write(b"".join(pieces))

    def sync(self) -> None:
        """Let all that was appended outlive a loss of power, and mark that it does. Raises StorageError."""
        try:
            self._disk.sync(self._descriptor)
        except OSError as error:
            # After a failed sync the kernel may have dropped the pages: nothing more may be acknowledged.
            raise StorageError(f"journal segment {self.path} cannot be synced: {error}; {REMEDY}") from error
        self.durable = Durable(self.header.identity, self.size)
        self._write(mark_bytes(self.header.identity, self.size))

    def close(self) -> None:
        """Give the file up; what was not synced may be lost. Raises StorageError."""
        try:
            self._disk.close(self._descriptor)
        except OSError as error:
            raise StorageError(f"journal segment {self.path} cannot be closed: {error}; {REMEDY}") from error

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._disk, self._descriptor, data)
        except OSError as error:
            raise StorageError(f"journal segment {self.path} cannot be written: {error}; {REMEDY}") from error
        self.size += len(data)


def write_whole(path: Path, entries: Sequence[tuple[int, int, bytes]], disk: Disk = DISK) -> None:
    """Make a segment that has its name once it holds these entries; sync the folder then. Raises OSError."""
    identity, end, pieces = secrets.randbits(64), HEADER_BYTES, [b""]
    for schema, kind, payload in entries:
        pieces.append(frame_bytes(identity, end, schema, kind, payload))
        end += len(pieces[-1])
    pieces.append(mark_bytes(identity, end))  # by which it can be read without its header
    pieces[0] = SegmentHeader(FORMAT, number_of(path), identity, Durable(identity, end)).to_bytes()
    draft = path.with_name(f".{path.name}.new")
    disk.remove(draft)
    descriptor = disk.create(draft)
    try:
        for piece in pieces:
            write_all(disk, descriptor, piece)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    disk.rename(draft, path)


def read_segment(path: Path, salvage: bool = False, disk: Disk = DISK) -> Iterator[Frame | Corruption | TornTail]:
    """Frames of a segment in order, then a `TornTail` if the file does not end with a whole frame.

    What it yields is durable: see `Disk.read`. With `salvage`, a `Corruption` stands in place of what was
    acknowledged and cannot be read any more.

    Raises:
        StorageError: it cannot be read, is of a newer format, or is damaged and not to be salvaged.
    """
    try:
        # First, since its writer may go on while this one is read.
        following = _following_header(path)
        data = disk.read(path)
    except OSError as error:
        raise StorageError(f"journal segment {path} cannot be read: {error}") from error
    for piece in _pieces(path, data, following):
        if isinstance(piece, Corruption) and not salvage:
            raise corruption_error(path, piece)
        yield piece


def corruption_error(path: Path, found: Corruption) -> StorageError:
    """What to say of a segment that lost acknowledged bytes."""
    return StorageError(
        f"journal segment {path} is damaged at bytes {found.start} to {found.end} ({found.reason}): what was "
        "acknowledged there is lost; restore the file from a copy, or go on without it: `agentrl resume RUN --salvage`"
    )


def read_frames_at(path: Path, starts: Iterable[int]) -> Iterator[Frame]:
    """The frames that begin at these places of a segment. Raises StorageError if one cannot be read."""
    starts = list(starts)
    if not starts:  # its writer may have died as it made the file, which then has no header
        return
    try:
        with path.open("rb", _AHEAD_BYTES) as file:
            header = SegmentHeader.of(file.read(HEADER_BYTES), path)
            if header is None:
                raise corruption_error(path, Corruption(0, HEADER_BYTES, "the header cannot be read"))
            for start in starts:
                yield _frame_at(path, file, header.identity, start)
    except OSError as error:
        raise StorageError(f"journal segment {path} cannot be read: {error}") from error


def _frame_at(path: Path, file: BinaryIO, identity: int, start: int) -> Frame:
    file.seek(start)
    head = file.read(FRAME_HEADER_BYTES)
    data = head + file.read(payload_bytes(head))
    piece = next(read_frames(identity, data, start), TornTail(start, "the file ends here"))
    if not isinstance(piece, Frame):
        raise corruption_error(path, Corruption(start, start + len(data), piece.reason))
    return piece


def segment_path(folder: Path, writer: str, number: int) -> Path:
    """Where a writer's segment stands."""
    return folder / f"{writer}-{number:08d}.journal"


def segment_paths(folder: Path, writer: str) -> list[Path]:
    """A writer's segments, oldest first."""
    return sorted(folder.glob(f"{writer}-????????.journal"))


def number_of(path: Path) -> int:
    """A segment's number by its name."""
    return int(path.stem.rpartition("-")[2])


def writer_of(path: Path) -> str:
    """Whose segment it is by its name."""
    return path.stem.rpartition("-")[0]


def read_header(path: Path) -> SegmentHeader | None:
    """A segment's header; None if the file was not yet one when its writer died. Raises OSError, StorageError."""
    with path.open("rb") as file:
        return SegmentHeader.of(file.read(HEADER_BYTES), path)


def read_durable(path: Path, disk: Disk = DISK) -> Durable:
    """How far a segment can be read, all of which is durable from here on. Raises StorageError."""
    # Before it is read, since what another process appends meanwhile may not be.
    end = path.stat().st_size
    for piece in read_segment(path, salvage=True, disk=disk):
        end = min(end, piece.at) if isinstance(piece, TornTail) else end
    header = read_header(path)
    return NOTHING if header is None else Durable(header.identity, end)


def _pieces(path: Path, data: bytes, following: bytes) -> Iterator[Frame | Corruption | TornTail]:
    header = SegmentHeader.of(data, path)
    body = memoryview(data)[HEADER_BYTES:]
    identity = find_identity(body, HEADER_BYTES) if header is None else header.identity
    proven = max(_durable_end(path, identity, following), 0 if header is None else header.whole_bytes)
    # The header is synced before anything is written behind it, so a part of it alone is a torn tail.
    if header is None and not body and not proven:
        yield TornTail(0, "the file has no header")
        return
    if header is None:
        yield Corruption(0, max(len(data), proven) if identity is None else HEADER_BYTES, "the header cannot be read")
    if identity is not None:
        yield from read_frames(identity, body, HEADER_BYTES, proven)


def _following_header(path: Path) -> bytes:
    """The start of the segment behind this one, a byte longer than its header if anything follows that."""
    try:
        with segment_path(path.parent, writer_of(path), number_of(path) + 1).open("rb") as file:
            return file.read(HEADER_BYTES + 1)
    except FileNotFoundError:
        return b""


def _durable_end(path: Path, identity: int | None, following: bytes) -> int:
    """How many of its bytes the segment behind this one knows to be durable; 0 without one."""
    header = SegmentHeader.of(following, path)
    # A header that nothing stands behind may not be synced yet, and be that of an older file of its name.
    if header is None or header.whole_bytes or (len(following) <= HEADER_BYTES and header.before.identity != identity):
        return 0
    return header.before.end
