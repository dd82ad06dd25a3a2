"""Appends entries to a journal's segments; its calls block, so `JournalWriter` makes them in a thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.journal.disk import DISK, Disk
from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.journal.segments import (
    NOTHING,
    REMEDY,
    Durable,
    SegmentFile,
    number_of,
    read_durable,
    segment_path,
    segment_paths,
)
from agentrl.process.crash_points import crash_point
from agentrl.types.errors import StorageError

SEGMENT_BYTES = 64 * 2**20

Entries = list[tuple[int, int, bytes]]
"""Schema, kind and payload of each."""


class SegmentAppender:
    """Makes entries durable, in one segment after the other; no two calls at once."""

    def __init__(
        self,
        folder: Path,
        name: str,
        segment_bytes: int = SEGMENT_BYTES,
        check_right: Callable[[], None] = lambda: None,
        disk: Disk = DISK,
    ) -> None:
        """`check_right` is asked before every write and raises if another process has taken over."""
        self._folder, self._name, self._segment_bytes = folder, name, segment_bytes
        role = name.partition("-")[0]
        self._written, self._synced, self._made = f"{role}.written", f"{role}.synced", f"{role}.segment_made"
        self._check_right, self._disk = check_right, disk
        self._segment: SegmentFile | None = None

    def append(self, entries: Entries) -> SegmentEnd:
        """Write and sync; says how far the newest segment is durable. Raises StorageError, after which it is over."""
        self._check_right()
        if self._segment is None:
            self._segment = self._first_segment()
        elif self._segment.size >= self._segment_bytes:
            full, self._segment = self._segment, None
            full.close()
            self._segment = self._make_segment(full.header.number + 1, full.durable)
        self._segment.append(entries)
        crash_point(self._written)
        self._segment.sync()
        end = SegmentEnd(self._segment.path.name, self._segment.durable.end)
        crash_point(self._synced)
        return end

    def close(self) -> None:
        """Give the file up; safe to call twice."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _first_segment(self) -> SegmentFile:
        """One behind those of earlier starts; none of them is written to again."""
        try:
            self._disk.make_folder(self._folder)
        except OSError as error:
            raise StorageError(f"journal folder {self._folder} cannot be made: {error}; {REMEDY}") from error
        older = segment_paths(self._folder, self._name)
        if not older:
            return self._make_segment(1, NOTHING)
        return self._make_segment(number_of(older[-1]) + 1, read_durable(older[-1], self._disk))

    def _make_segment(self, number: int, before: Durable) -> SegmentFile:
        path = segment_path(self._folder, self._name, number)
        segment = SegmentFile.create(path, number, self._disk, before)
        crash_point(self._made)
        return segment
