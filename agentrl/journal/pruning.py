"""Segments that nobody needs any more are deleted."""

from __future__ import annotations

from pathlib import Path

from agentrl.journal.archive import archived_until
from agentrl.journal.archive_query import held, tied_to
from agentrl.journal.index import JournalIndex
from agentrl.journal.segments import sync_folder, writer_of
from agentrl.process.crash_points import crash_point
from agentrl.types.errors import StorageError


def prune(folder: Path, target: Path) -> int:
    """Delete segments whose every episode is final and archived in `target` and whose every entry is covered.

    The newest segment of each writer stays: it may be written, and `verify_offsets` would miss it. So the journal takes
    no more than the segments in which an episode lies that is in play, waits to be trained, or was trained since the
    last archived checkpoint, and one segment (64 MiB) for each writer's name. An episode that is neither trained nor
    dropped keeps its segments for ever. Returns how many were deleted.

    A crash at any moment is harmless. An entry that says that episodes are final outlives all their entries, and
    entries of the buffer go in the order of the journal, so what is left means what it meant.

    Raises:
        StorageError: a segment cannot be read or deleted, or the archive is another journal's.
    """
    journal = JournalIndex(folder)
    left = list(journal.identities)
    newest = {writer_of(path): path for path in left}
    free = set(left) - held(journal, after=archived_until(target)) - set(newest.values())
    tied = tied_to(journal)
    gone: set[Path] = set()
    while (path := _next(left, free, tied, gone)) is not None:
        _delete(path)
        left.remove(path)
        gone.add(path)
    crash_point("archive.pruned")
    return len(gone)


def _next(left: list[Path], free: set[Path], tied: dict[Path, set[Path]], gone: set[Path]) -> Path | None:
    """A free segment that may go now: the oldest of its writer, since one between others would be missed.

    With entries of the buffer it must be the oldest that has such, and outlive whatever these make final.
    """
    writers: set[str] = set()
    has_older_buffer = False
    for path in left:
        has_buffer = path in tied
        is_oldest = writer_of(path) not in writers and not (has_buffer and has_older_buffer)
        writers.add(writer_of(path))
        has_older_buffer |= has_buffer
        if is_oldest and path in free and not tied.get(path, set()) - gone - {path}:
            return path
    return None


def _delete(path: Path) -> None:
    """For good once this returns: a loss of power leaves no gap between segments."""
    try:
        path.unlink()
        crash_point("archive.deleted")
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be deleted: {error}") from error
