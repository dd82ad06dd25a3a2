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
from dataclasses import dataclass
from pathlib import Path

from agentrl.journal.archive_file import (
    Consumed,
    ConsumedWriter,
    archive_files,
    number_of_file,
    read_metadata,
    record_of,
)
from agentrl.journal.archive_query import Checkpoint, consumed, last_checkpoint
from agentrl.journal.disk import DISK, sync_path
from agentrl.journal.entries import Dropped, Entry, Leased, unpack
from agentrl.journal.finality import step_of
from agentrl.journal.frames import Frame
from agentrl.journal.history import build_history, counting
from agentrl.journal.index import JournalIndex
from agentrl.journal.reading import all_segments
from agentrl.journal.segments import sync_folder
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


def archive(folder: Path, target: Path, keep_bytes: int | None = None) -> Archived:
    """Write all episodes that are final and not archived yet to a new file ``consumed-<step>-<number>.parquet``.

    The journal may be written meanwhile; the archive has one writer at a time. Beyond `keep_bytes` the oldest files
    are deleted, so the archive takes at most that, or its newest file if that is larger. In memory are a few dozen
    episodes at once.

    Raises:
        StorageError: the disk is full or cannot be read or written, or the archive is another journal's.
    """
    if not all_segments(folder):
        return Archived()
    with _writing(target):
        DISK.make_folder(target)
        for draft in target.glob(".consumed-*.parquet.new"):
            draft.unlink()
    file, episodes, incomplete = _archive(JournalIndex(folder), target)
    if incomplete:
        _log.warning("%d consumed episodes are not in %s: their first entries are gone", incomplete, target)
    with _writing(target):
        deleted = _make_room(target, keep_bytes)
    return Archived(file, episodes, incomplete, len(deleted), sum(deleted))


def archived_until(target: Path) -> Checkpoint | None:
    """The last checkpoint that the archive covers. Raises StorageError if its newest file cannot be read."""
    files = archive_files(target)
    if not files:
        return None
    segment, start, step, identity = json.loads(read_metadata(files[-1])[_UNTIL])
    return Checkpoint(segment, start, step, int.from_bytes(bytes.fromhex(identity), "little"))


def _archive(journal: JournalIndex, target: Path) -> tuple[Path | None, int, int]:
    until = last_checkpoint(journal)
    keys = consumed(journal, after=archived_until(target))
    if until is None or not keys:
        return None, 0, 0
    files = archive_files(target)
    number = number_of_file(files[-1]) + 1 if files else 1
    path = target / f"consumed-{until.step:06d}-{number:06d}.parquet"
    # Tools that are given the folder pass over hidden files.
    draft = path.with_name(f".{path.name}.new")
    identity = until.identity.to_bytes(8, "little").hex()
    footer = {_UNTIL: json.dumps([until.segment, until.start, until.step, identity])}
    written = 0
    with _writing(target):
        with ConsumedWriter(draft, footer) as writer:
            for rows in _row_groups(_episodes(journal, keys)):
                writer.write(rows)
                written += len(rows)
        _put_in_place(draft, path)
    return path, written, len(keys) - written


def _episodes(journal: JournalIndex, keys: Sequence[int]) -> Iterator[Consumed]:
    """Episodes by key; those without a beginning are left out."""
    for first in range(0, len(keys), _READ_AT_ONCE):
        some = keys[first : first + _READ_AT_ONCE]
        found = journal.frames(some)
        for key in some:
            if (episode := _read(found.get(key, []))) is not None:
                outcome, reason, step = _outcome(journal.buffer[journal.final[key].source].entry)
                yield Consumed(*episode, outcome, reason, step)


def _read(frames: Sequence[Frame]) -> tuple[Episode, bytes] | None:
    """An episode and its record; None if its first entry that counts is not its first lease."""
    entries = [unpack(f.schema, f.kind, f.payload) for f in frames]
    places = counting([(entry.token, entry.taken_over if isinstance(entry, Leased) else None) for entry in entries])
    first = entries[places[0]] if places else None
    if not isinstance(first, Leased) or first.taken_over:
        return None
    life = build_history(entries)
    return None if life is None else (life.episode(), record_of(frames[place] for place in places))


def _outcome(entry: Entry) -> tuple[str, str | None, int]:
    if isinstance(entry, Dropped):
        return "dropped", entry.reason, entry.step
    return "trained", None, step_of(entry)


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


def _put_in_place(draft: Path, path: Path) -> None:
    sync_path(draft)
    crash_point("archive.drafted")
    draft.rename(path)
    sync_folder(path.parent)
    crash_point("archive.placed")


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
