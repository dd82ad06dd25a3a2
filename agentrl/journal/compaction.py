"""One segment takes the place of many: what is still needed of them is copied, and they are deleted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentrl.journal.disk import DISK, Disk
from agentrl.journal.entries import Compacted, pack
from agentrl.journal.index import JournalIndex
from agentrl.journal.reading import COMPACTED, all_segments, is_compacted
from agentrl.journal.segments import number_of, read_frames_at, segment_path, write_whole, writer_of
from agentrl.process.crash_points import crash_point
from agentrl.types.errors import StorageError

Packed = tuple[int, int, bytes]


def compact(journal: JournalIndex, token: int, disk: Disk = DISK) -> int:
    """Replace all segments that nobody writes any more by one, once all that is final in `journal` is archived.

    It holds what of them is not final, and is made only if it takes at most half of their bytes: so the journal takes
    no more than twice what is not final, and one segment (64 MiB) for each writer's name. That newest one stays: it
    may be written, and `verify_offsets` would miss it. `token` is that of the claim: a process that was replaced makes
    no file that counts. In memory is all that is kept. Returns how many segments were deleted.

    A crash at any moment is harmless: the new segment has its name once it is whole, and says what it replaces, so
    whoever reads passes over segments that were not deleted yet, or come back with a loss of power.

    Raises:
        StorageError: a segment cannot be read, written or deleted.
    """
    closed = _closed(journal)
    kept = list(_kept(journal, closed))
    is_worth_it = closed and 2 * sum(len(entry[2]) for entry in kept) <= sum(path.stat().st_size for path in closed)
    gone = [*journal.segments.superseded, *(closed if is_worth_it else ())]
    if not gone:
        return 0
    folder = gone[0].parent
    try:
        if is_worth_it:
            replaced = {writer_of(path): number_of(path) for path in closed if not is_compacted(path)}
            write_compacted(folder, token, {**journal.segments.replaced, **replaced}, kept, disk)
        disk.sync_folder(folder)
        crash_point("archive.compacted")
        for path in gone:
            disk.remove(path)
            crash_point("archive.deleted")
        disk.sync_folder(folder)
    except OSError as error:
        raise StorageError(f"journal {folder} cannot be compacted: {error}; free space there") from error
    return len(gone)


def write_compacted(
    folder: Path, token: int, replaced: Mapping[str, int], entries: Sequence[Packed], disk: Disk = DISK
) -> None:
    """Let these entries take the place of each writer's segments up to a number; for good once the folder is synced.

    Raises OSError.
    """
    number = 1 + max((number_of(path) for path in all_segments(folder) if is_compacted(path)), default=0)
    made = segment_path(folder, f"{COMPACTED}-{token:06d}", number)
    for draft in folder.glob(f".{COMPACTED}-*.new"):
        if draft.name < f".{made.name}.new":
            disk.remove(draft)
    write_whole(made, [pack(None, Compacted(dict(replaced))), *entries], disk)


def _closed(journal: JournalIndex) -> list[Path]:
    """Segments that will not be written again and were read to their ends, with all before them of their writer."""
    newest = {writer_of(path): path for path in journal.segments.paths if not is_compacted(path)}
    closed: list[Path] = []
    stopped: set[str] = set()
    for path in journal.segments.paths:
        writer = writer_of(path)
        if path == newest.get(writer) or path in journal.unread:
            stopped.add(writer)
        if writer not in stopped:
            closed.append(path)
    return closed


def _kept(journal: JournalIndex, closed: list[Path]) -> Iterator[Packed]:
    """What of these segments is still needed, in order."""
    starts: dict[Path, list[int]] = {path: [] for path in closed}
    for key in journal.unfinished:
        for path, places in journal.places[key].items():
            if path in starts:
                starts[path].extend(places)
    for place in _needed(journal, starts):
        found = journal.buffer[place]
        if found.segment in starts:
            starts[found.segment].append(found.start)
    for path, places_kept in starts.items():
        for frame in read_frames_at(path, sorted(places_kept)):
            yield frame.schema, frame.kind, frame.payload


def _needed(journal: JournalIndex, closed: dict[Path, list[int]]) -> set[int]:
    """Places of the buffer's entries that no checkpoint covers, or that made episodes final of which some is elsewhere.

    With these go the checkpoints that cover them, and the last one.
    """
    needed = {*journal.waiting, *journal.checkpoints[-1:], *journal.partial}
    needed |= {journal.covered[place] for place in journal.partial}
    for key, final in journal.final.items():
        if journal.places.get(key, {}).keys() - closed.keys():
            needed |= {final.source, final.checkpoint, *journal.sources[key]}
            needed |= {journal.covered[place] for place in journal.sources[key]}
    return needed
