"""Consumed episodes leave the journal: first into Parquet files, then their segments are deleted.

A file of the archive holds what became final between two checkpoints, and says in its footer up to which entry of
the journal that is. This is all that is known about what is archived, so a crash anywhere between writing a file,
renaming it and deleting segments leaves nothing to repair: what the newest file covers is archived, the rest not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from agentrl import codec
from agentrl.journal.archive_file import Consumed, ConsumedWriter, check_file, read_metadata, record_of
from agentrl.journal.archive_names import archive_files, file_name, number_of_file
from agentrl.journal.disk import DISK, Disk
from agentrl.journal.entries import Checkpointed, Dropped, Leased, Taken, unpack
from agentrl.journal.frames import Frame
from agentrl.journal.history import build_history, counting
from agentrl.journal.index import JournalIndex
from agentrl.journal.reading import is_compacted
from agentrl.journal.segments import number_of, read_header
from agentrl.process.crash_points import crash_point
from agentrl.types.episode import Episode
from agentrl.types.errors import StorageError

_log = logging.getLogger(__name__)
_READ_AT_ONCE = 64
_ROW_GROUP_TOKENS = 2**20
_UNTIL = "agentrl.archived_until"


@dataclass(frozen=True, slots=True)
class Archived:
    """What a call did: the file, if there was anything to archive, and what made room for it.

    `incomplete` counts episodes whose first entries were gone, as after an archive was deleted by hand.
    """

    file: Path | None = None
    episodes: int = 0
    incomplete: int = 0
    deleted_files: int = 0
    deleted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A `Checkpointed` by its place in the journal; `identity` is of its segment, which may be gone by now."""

    segment: str
    start: int
    step: int
    identity: str

    def is_before(self, segment: Path, start: int) -> bool:
        """Whether a place of the journal is behind this one."""
        own = Path(self.segment)
        return (number_of(segment), segment.name, start) > (number_of(own), own.name, self.start)


def archive(journal: JournalIndex, target: Path, keep_bytes: int | None = None, disk: Disk = DISK) -> Archived:
    """Write all episodes that are final and not archived yet to a new file of the archive.

    The journal may be written meanwhile; the archive has one writer at a time. Beyond `keep_bytes` the oldest files
    are deleted, so the archive takes at most that, or its newest file if that is larger. In memory are a few dozen
    episodes at once.

    Raises:
        StorageError: the disk is full or cannot be read or written, or the archive is another journal's.
    """
    if not journal.segments.paths:
        return Archived()
    with _writing(target):
        disk.make_folder(target)
        for draft in target.glob(".consumed-*.parquet.new"):
            draft.unlink()
    keys = _unarchived(journal, archived_until(target))
    path = _write(journal, keys, target, disk) if keys else None
    written = 0 if path is None else path[1]
    if len(keys) > written:
        _log.warning("%d consumed episodes are not in %s: their first entries are gone", len(keys) - written, target)
    with _writing(target):
        deleted = _make_room(target, keep_bytes)
    return Archived(None if path is None else path[0], written, len(keys) - written, len(deleted), sum(deleted))


def archived_until(target: Path) -> Checkpoint | None:
    """The last checkpoint that the archive covers. Raises StorageError if its newest file is damaged."""
    files = archive_files(target)
    if not files:
        return None
    metadata = read_metadata(files[-1])
    check_file(files[-1])
    return Checkpoint(*json.loads(metadata[_UNTIL]))


def unarchived(journal: JournalIndex, target: Path) -> set[int]:
    """Keys of the episodes of a journal that are not in its archive, final or not.

    Raises StorageError if its newest file cannot be read, or the archive is another journal's.
    """
    return {*journal.unfinished, *_unarchived(journal, archived_until(target))}


def _unarchived(journal: JournalIndex, after: Checkpoint | None) -> list[int]:
    """Keys of the episodes that a checkpoint behind `after` made final, in the order of their training or dropping.

    Raises StorageError if `after` is another journal's.
    """
    if after is not None:
        for path in journal.segments.paths:
            if path.name == after.segment and _identity(path) != after.identity:
                raise StorageError(f"the archive is not of the journal {path.parent}; give it a folder of its own")
    behind: set[int] = set()
    for place in journal.checkpoints:
        found = journal.buffer[place]
        # What a compacted segment holds that is final had been archived before that was made.
        if not is_compacted(found.segment) and (after is None or after.is_before(found.segment, found.start)):
            behind.add(place)
    keys = [key for key, final in journal.final.items() if key in journal.leased and final.checkpoint in behind]
    return sorted(keys, key=lambda key: (journal.final[key].source, journal.final[key].rank))


def _until(journal: JournalIndex) -> Checkpoint:
    """The last checkpoint."""
    found = journal.buffer[journal.checkpoints[-1]]
    assert isinstance(found.entry, Checkpointed)
    step = max(found.entry.steps.values(), default=0)
    return Checkpoint(found.segment.name, found.start, step, _identity(found.segment))


def _identity(path: Path) -> str:
    header = read_header(path)
    return "" if header is None else header.identity.to_bytes(8, "little").hex()


def _write(journal: JournalIndex, keys: Sequence[int], target: Path, disk: Disk) -> tuple[Path, int]:
    """The new file, and how many episodes are in it: those without a beginning are left out."""
    until = _until(journal)
    files = archive_files(target)
    number = number_of_file(files[-1]) + 1 if files else 1
    # Tools that are given the folder pass over hidden files.
    draft = target / f".consumed-{until.step:06d}-{number:06d}.parquet.new"
    footer = {_UNTIL: json.dumps(astuple(until))}
    written = 0
    with _writing(target):
        with ConsumedWriter(draft, footer) as writer:
            for rows in _row_groups(_episodes(journal, keys)):
                writer.write(rows)
                written += len(rows)
        path = target / file_name(until.step, number, codec.file_digest(draft))
        disk.sync_path(draft)
        crash_point("archive.drafted")
        disk.rename(draft, path)
        disk.sync_folder(target)
        crash_point("archive.placed")
    return path, written


def _episodes(journal: JournalIndex, keys: Sequence[int]) -> Iterator[Consumed]:
    """Episodes by key; those without a beginning are left out."""
    for first in range(0, len(keys), _READ_AT_ONCE):
        some = keys[first : first + _READ_AT_ONCE]
        found = journal.frames(some)
        for key in some:
            if (episode := _read(found.get(key, []))) is not None:
                outcome, reason, step = _outcome(journal, key)
                yield Consumed(*episode, outcome, reason, step)


def _read(frames: Sequence[Frame]) -> tuple[Episode, bytes] | None:
    """An episode and its record; None if its first entry that counts is not its first lease."""
    entries = [unpack(f.schema, f.kind, f.payload) for f in frames]
    places = counting([(entry.token, entry.taken_over if isinstance(entry, Leased) else None) for entry in entries])
    first = entries[places[0]] if places else None
    if not isinstance(first, Leased) or first.taken_over:
        return None
    history = build_history(entries)
    return None if history is None else (history.episode(), record_of(frames[place] for place in places))


def _outcome(journal: JournalIndex, key: int) -> tuple[str, str | None, int]:
    """Of an episode that several policies trained the newest step counts."""
    last = journal.buffer[journal.final[key].source].entry
    if isinstance(last, Dropped):
        return "dropped", last.reason, last.step
    entries = (journal.buffer[place].entry for place in journal.sources[key])
    return "trained", None, 1 + max(entry.step for entry in entries if isinstance(entry, Taken))


def _row_groups(rows: Iterator[Consumed]) -> Iterator[list[Consumed]]:
    """Rows in groups of about a million tokens: what a reader of one episode has to unpack."""
    group: list[Consumed] = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += row.episode.num_tokens
        if tokens >= _ROW_GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"the archive {target} cannot be written: {error}; free space there") from error


def _make_room(target: Path, keep_bytes: int | None) -> list[int]:
    """Sizes of the files that were deleted; the newest stays, since it says what is archived."""
    sizes = {path: path.stat().st_size for path in archive_files(target)}
    deleted: list[int] = []
    for path, size in list(sizes.items())[:-1]:
        if keep_bytes is None or sum(sizes.values()) - sum(deleted) <= keep_bytes:
            break
        path.unlink()
        deleted.append(size)
    return deleted
