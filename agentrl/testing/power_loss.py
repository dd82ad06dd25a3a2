"""A disk that remembers in which order it was told what, and what of it a loss of power leaves at any moment.

What was synced is there. Of each write that was not, the whole is there, or nothing, or a part up to or from any
byte on, whatever became of the writes before it; where a file has grown without its data, zeros stand, or bytes of
another file. A name whose folder was not synced may be missing, a removed one may be back. Bytes that were synced
stay as they are: a disk that spoils them when it writes their neighbours is not what is modelled here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random

from agentrl.journal.disk import Disk

Content = dict[Path, bytes]
"""Files by their path below the root."""


class Call(StrEnum):
    """What a disk can be told to do."""

    MAKE_FOLDER = "make_folder"
    CREATE = "create"
    WRITE = "write"
    SYNC = "sync"
    SYNC_FOLDER = "sync_folder"
    REMOVE = "remove"
    RENAME = "rename"


@dataclass(frozen=True, slots=True)
class Operation:
    """One call that went through; `data` of a rename is the new path.

    Example: ``Operation(Call.WRITE, Path("journal/w-00000001.journal"), b"...")``.
    """

    call: Call
    path: Path
    data: bytes = b""


class RecordingDisk(Disk):
    """Notes every call below `root` in order, from any thread; syncs nothing for real.

    Without `syncs_files`, `syncs_names` (of files), `syncs_folders` (their own names) or `syncs_reads` it passes
    such calls over: a test that looks for losses must find them then.
    """

    def __init__(
        self,
        root: Path,
        syncs_files: bool = True,
        syncs_names: bool = True,
        syncs_folders: bool = True,
        syncs_reads: bool = True,
    ) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._syncs_files, self._syncs_names = syncs_files, syncs_names
        self._syncs_folders, self._syncs_reads = syncs_folders, syncs_reads
        self._is_making_folders = False
        self._open: dict[int, Path] = {}
        self._lock = threading.RLock()

    @property
    def moment(self) -> int:
        """How many calls have gone through."""
        return len(self.operations)

    def make_folder(self, folder: Path) -> None:
        """See `Disk`; the names are noted before they are synced."""
        with self._lock:
            for path in (*reversed(folder.parents), folder):
                if not path.exists():
                    self._note(Call.MAKE_FOLDER, path)
            self._is_making_folders = True
            super().make_folder(folder)
            self._is_making_folders = False

    def create(self, path: Path) -> int:
        """See `Disk`."""
        with self._lock:
            descriptor = super().create(path)
            self._open[descriptor] = path
            self._note(Call.CREATE, path)
            return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """See `Disk`."""
        with self._lock:
            written = super().write(descriptor, data)
            self._note(Call.WRITE, self._open[descriptor], bytes(data[:written]))
            return written

    def sync(self, descriptor: int) -> None:
        """See `Disk`."""
        with self._lock:
            if self._syncs_files:
                self._note(Call.SYNC, self._open[descriptor])

    def sync_folder(self, folder: Path) -> None:
        """See `Disk`."""
        with self._lock:
            if self._syncs_folders if self._is_making_folders else self._syncs_names:
                self._note(Call.SYNC_FOLDER, folder)

    def sync_path(self, path: Path) -> None:
        """See `Disk`; the file was written past this disk."""
        with self._lock:
            self._note(Call.CREATE, path)
            self._note(Call.WRITE, path, path.read_bytes())
            if self._syncs_files:
                self._note(Call.SYNC, path)

    def rename(self, path: Path, target: Path) -> None:
        """See `Disk`."""
        with self._lock:
            super().rename(path, target)
            self._note(Call.RENAME, path, str(target.relative_to(self.root)).encode())

    def close(self, descriptor: int) -> None:
        """See `Disk`."""
        with self._lock:
            del self._open[descriptor]
            super().close(descriptor)

    def read(self, path: Path) -> bytes:
        """See `Disk`."""
        with self._lock:
            if self._syncs_reads:
                self._note(Call.SYNC, path)
            return path.read_bytes()

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        with self._lock:
            if path.exists():
                self._note(Call.REMOVE, path)
            super().remove(path)

    def _note(self, call: Call, path: Path, data: bytes = b"") -> None:
        if path.is_relative_to(self.root):
            self.operations.append(Operation(call, path.relative_to(self.root), data))


@dataclass(slots=True)
class _File:
    """What of a file has been synced, and the writes behind it that have not."""

    synced: bytes = b""
    pending: list[bytes] = field(default_factory=list)

    def whole(self) -> bytes:
        return b"".join((self.synced, *self.pending))

    def sync(self) -> None:
        self.synced, self.pending = self.whole(), []

    def after_loss(self, random: Random, others: Sequence[bytes]) -> bytes:
        """What power loss leaves; `others` are bytes that may stand where data is missing."""
        if not self.pending:
            return self.synced
        kept: list[tuple[int, bytes]] = []
        starts, at = [len(self.synced)], len(self.synced)
        survival = random.choice((0.0, 0.3, 0.7, 1.0))
        for piece in self.pending:
            first, last = _part(len(piece), survival, random)
            kept += [(at + first, piece[first:last])] if first < last else []
            at += len(piece)
            starts.append(at)
        size = max([random.choice(starts), *(start + len(piece) for start, piece in kept)])
        data = bytearray(self.synced + _filler(len(self.synced), size, random, others))
        for start, piece in kept:
            data[start : start + len(piece)] = piece
        return bytes(data)


class DiskImage:
    """A disk's content while operations are applied to it one after the other.

    Example: with a file created, synced and its folder synced, then 10 bytes written: ``cached`` holds all of them,
    ``after_loss`` any part.
    """

    def __init__(self, content: Content) -> None:
        """Begins with files that have outlived what came before."""
        self._live: dict[Path, _File | None] = {path: _File(data) for path, data in content.items()}
        self._live |= {folder: None for path in content for folder in path.parents}
        self._lasting = dict(self._live)
        self._pending_names: list[tuple[Path, _File | None, bool]] = []

    def apply(self, operation: Operation) -> None:
        """Let one more call have gone through."""
        path = operation.path
        match operation.call:
            case Call.MAKE_FOLDER | Call.CREATE:
                self._live[path] = None if operation.call == Call.MAKE_FOLDER else _File()
                self._pending_names.append((path, self._live[path], True))
            case Call.REMOVE:
                self._pending_names.append((path, self._live.pop(path), False))
            case Call.RENAME:
                file, target = self._live.pop(path), Path(operation.data.decode())
                self._live[target] = file
                self._pending_names += [(path, file, False), (target, file, True)]
            case Call.WRITE:
                self._file(path).pending.append(operation.data)
            case Call.SYNC:
                self._file(path).sync()
            case Call.SYNC_FOLDER:
                _settle(self._lasting, [name for name in self._pending_names if name[0].parent == path])
                self._pending_names = [name for name in self._pending_names if name[0].parent != path]

    def cached(self) -> Content:
        """What a process that dies leaves to the next one on a machine that lives."""
        return {path: file.whole() for path, file in self._live.items() if file is not None}

    def after_loss(self, random: Random) -> Content:
        """Files that one loss of power leaves, by chance."""
        names = dict(self._lasting)
        _settle(names, [name for name in self._pending_names if random.random() < 0.5])
        others = [file.whole() for file in self._live.values() if file is not None]
        return {
            path: file.after_loss(random, others)
            for path, file in names.items()
            if file is not None and all(folder in names for folder in path.parents if folder != Path())
        }

    def _file(self, path: Path) -> _File:
        file = self._live[path]
        assert file is not None, f"{path} is a folder"
        return file


def write_content(root: Path, content: Content, present: Content) -> None:
    """Make the files below `root` those of `content`; `present`, which says what is there, is brought up to date."""
    for path in present.keys() - content.keys():
        (root / path).unlink()
        del present[path]
    for path, data in content.items():
        if present.get(path) != data:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
            present[path] = data


def _settle(names: dict[Path, _File | None], changes: Sequence[tuple[Path, _File | None, bool]]) -> None:
    for path, file, is_made in changes:
        if is_made:
            names[path] = file
        else:
            names.pop(path, None)


def _part(size: int, survival: float, random: Random) -> tuple[int, int]:
    """First and last byte of what is left of a write of `size` bytes."""
    if random.random() < survival:
        return 0, size
    cut = random.randint(0, size)
    return random.choice(((0, 0), (0, cut), (cut, size)))


def _filler(start: int, end: int, random: Random, others: Sequence[bytes]) -> bytes:
    """What stands between two places of a file where nothing was written."""
    old = random.choice((b"", *others))[start:end]
    return old + bytes(end - start - len(old))
