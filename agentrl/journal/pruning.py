"""Segments that nobody needs any more are deleted."""

from __future__ import annotations

from pathlib import Path

from agentrl.journal.archive import archived_until
from agentrl.journal.consumption import Segment, forget, held, known_segments, tied_to
from agentrl.journal.index import JournalIndex, with_index
from agentrl.journal.reading import all_segments
from agentrl.journal.segments import sync_folder
from agentrl.process.crash_points import crash_point
from agentrl.types.errors import StorageError


def prune(folder: Path, target: Path) -> int:
    """Delete segments whose every episode is final and archived in `target` and whose every entry is covered.

    The newest segment of each writer stays: it may be written, and `check_reach` would miss it. So the journal takes
    no more than the segments in which an episode lies that is in play, waits to be trained, or was trained since the
    last archived checkpoint, and one segment (64 MiB) for each writer's name. An episode that is neither trained nor
    dropped keeps its segments for ever. Returns how many were deleted.

    A crash at any moment is harmless. An entry that says that episodes are final outlives all their entries, and
    entries of the buffer go in the order of the journal, so what is left means what it meant.

    Raises:
        StorageError: a segment cannot be deleted, or the archive is another journal's.
    """
    if not all_segments(folder):
        return 0
    pruned = with_index(folder, lambda journal: _prune(journal, target))
    crash_point("archive.pruned")
    return pruned


def _prune(journal: JournalIndex, target: Path) -> int:
    left = known_segments(journal)
    newest = {segment.writer: segment.number for segment in left}
    needed = held(journal, after=archived_until(target))
    free = {s.id for s in left if s.id not in needed and s.number != newest[s.writer]}
    gone: set[int] = set()
    while (segment := _next(journal, left, free, gone)) is not None:
        _delete(journal.folder, segment)
        left.remove(segment)
        gone.add(segment.id)
    forget(journal, gone)
    return len(gone)


def _next(journal: JournalIndex, left: list[Segment], free: set[int], gone: set[int]) -> Segment | None:
    """A free segment that may go now: the oldest of its writer, since one between others would be missed.

    With entries of the buffer it must be the oldest that has such, and outlive whatever these make final.
    """
    writers: set[str] = set()
    has_older_buffer = False
    for segment in left:
        is_oldest = segment.writer not in writers and not (segment.has_buffer and has_older_buffer)
        writers.add(segment.writer)
        has_older_buffer |= segment.has_buffer
        if not is_oldest or segment.id not in free:
            continue
        if not segment.has_buffer or not tied_to(journal, segment.id) - gone - {segment.id}:
            return segment
    return None


def _delete(folder: Path, segment: Segment) -> None:
    """For good once this returns: a loss of power leaves no gap between segments."""
    path = folder / segment.name
    try:
        path.unlink()
        crash_point("archive.deleted")
        sync_folder(folder)
    except OSError as error:
        raise StorageError(f"{path} cannot be deleted: {error}") from error
