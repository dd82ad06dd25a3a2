"""Segments that nobody needs any more are deleted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.journal.archive import archived_until
from agentrl.journal.consumption import Segment, forget, held, known_segments, tied_to
from agentrl.journal.index import JournalIndex, with_index
from agentrl.journal.reading import all_segments
from agentrl.journal.segments import sync_folder
from agentrl.process.crash_points import crash_point
from agentrl.types.errors import StorageError


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a call deleted."""

    segments: int = 0
    bytes: int = 0


def prune(folder: Path, target: Path, index: Path | None = None) -> Pruned:
    """Delete segments whose every episode is final and archived in `target` and whose every entry is covered.

    The newest segment of each writer stays: it may be written, and `check_reach` would miss it. So the journal takes
    no more than the segments in which an episode lies that is in play, waits to be trained, or was trained since the
    last archived checkpoint, and one segment (64 MiB) for each writer's name. An episode that is neither trained nor
    dropped keeps its segments for ever.

    A crash at any moment is harmless. An entry that says that episodes are final outlives all their entries, and
    entries of the buffer go in the order of the journal, so what is left means what it meant.

    Raises:
        StorageError: a segment cannot be deleted, or the archive is another journal's.
    """
    if not all_segments(folder):
        return Pruned()
    pruned = with_index(folder, index, lambda journal: _prune(journal, target))
    crash_point("archive.pruned")
    return pruned


def _prune(journal: JournalIndex, target: Path) -> Pruned:
    segments = known_segments(journal)
    newest = {segment.writer: segment.number for segment in segments}
    needed = held(journal, after=archived_until(target))
    free = [s for s in segments if s.id not in needed and s.number != newest[s.writer]]
    silent = _oldest_silent(segments, free)
    deleted = sum(_delete(journal.folder, segment) for segment in silent)
    gone = {segment.id for segment in silent}
    # Those with entries of the buffer follow one by one, as long as each is the oldest of them that is left.
    for segment in (segment for segment in segments if segment.has_buffer):
        if segment not in free or tied_to(journal, segment.id) - gone - {segment.id}:
            break
        deleted += _delete(journal.folder, segment)
        gone.add(segment.id)
    forget(journal, gone)
    return Pruned(len(gone), deleted)


def _oldest_silent(segments: list[Segment], free: list[Segment]) -> list[Segment]:
    """Of each writer the oldest segments that are free and only of episodes: one between others would be missed."""
    silent: list[Segment] = []
    blocked: set[str] = set()
    for segment in segments:
        if segment not in free or segment.has_buffer:
            blocked.add(segment.writer)
        elif segment.writer not in blocked:
            silent.append(segment)
    return silent


def _delete(folder: Path, segment: Segment) -> int:
    """Bytes that were freed, for good once this returns: a loss of power leaves no gap between segments."""
    path = folder / segment.name
    try:
        freed = path.stat().st_size
        path.unlink()
        crash_point("archive.deleted")
        sync_folder(folder)
    except OSError as error:
        raise StorageError(f"{path} cannot be deleted: {error}") from error
    return freed
