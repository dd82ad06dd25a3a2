"""Where each episode's entries lie and which episodes are final: a SQLite file made of the segments.

It is never the truth. What it says was read from segments and synced there before; if it is missing, damaged, of
another journal or of another schema, it is made anew, which takes some ten seconds for a million turns.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from agentrl.journal.entries import NUMBERS, Dropped, Entry, Taken, episode_key, unpack
from agentrl.journal.frames import Frame, Tear
from agentrl.journal.index_file import StaleIndexError, with_database
from agentrl.journal.reading import JournalState, all_segments, check_none_missing
from agentrl.journal.scanning import SegmentReader
from agentrl.journal.segments import HEADER_BYTES, number_of
from agentrl.journal.settling import CHECKPOINTED, Mark, settle, step_of

T = TypeVar("T")
INDEX_NAME = "index.sqlite"
IN_ORDER = "ORDER BY segments.number, segments.name, start"


def open_journal(folder: Path) -> JournalState:
    """What is not final: the episodes that are neither trained nor dropped for good, and what no checkpoint covers.

    Equal to `read_journal` without what is final (`settling` has the rule), at a cost that does not grow with it.

    Raises:
        StorageError: a segment cannot be read or is of a newer program, or the index cannot be written.
    """
    return with_index(folder, JournalIndex.state) if all_segments(folder) else JournalState()


def with_index(folder: Path, work: Callable[[JournalIndex], T]) -> T:
    """Do some work on an index that is up to date.

    The work may be done twice. Raises StorageError if segments cannot be read or the index cannot be written.
    """

    def updated(database: sqlite3.Connection) -> T:
        journal = JournalIndex(folder, database)
        journal.update()
        return work(journal)

    return with_database(folder / INDEX_NAME, updated)


def signed_key(episode_id: str) -> int:
    """An episode's key as SQLite has it."""
    return int.from_bytes(episode_key(episode_id).to_bytes(8, "little"), "little", signed=True)


class JournalIndex:
    """An open index.

    `tears` are the ends of segments that cannot be read, by file; `unread` numbers segments of which some was left
    for the next update.
    """

    def __init__(self, folder: Path, database: sqlite3.Connection) -> None:
        self.folder, self.database = folder, database
        self.tears: dict[Path, Tear] = {}
        self.unread: set[int] = set()

    def update(self) -> None:
        """Read what the segments hold beyond what is known.

        Raises:
            StaleIndexError: these are not the segments that the index was made of.
            StorageError: a segment cannot be read, or is of a newer program.
        """
        # Whoever is in the buffer's entries up to here has its own entries on disk already: reading to the ends of
        # the files, as they are later, finds them. Entries of the buffer behind that wait for the next update.
        sizes = _sizes(self.folder)
        paths = all_segments(self.folder)
        known = {name for (name,) in self.database.execute("SELECT name FROM segments")}
        if known - {path.name for path in paths}:
            raise StaleIndexError(f"segments are gone from {self.folder}")
        check_none_missing(paths)
        for path in paths:
            with SegmentReader(path) as reader:
                self._add(reader, sizes.get(path, 0))
        self._settle()

    def state(self) -> JournalState:
        """What is not final."""
        state = JournalState(tears=self.tears)
        for entries in self.entries(self.unfinished()).values():
            state.add_life(entries)
        for entry in self.uncovered():
            state.note(entry)
        return state

    def entries(self, keys: Iterable[int]) -> dict[int, list[Any]]:
        """What the journal holds of some episodes, by key, in the order of the journal."""
        return {key: [unpack(f.schema, f.kind, f.payload) for f in frames] for key, frames in self.frames(keys).items()}

    def frames(self, keys: Iterable[int]) -> dict[int, list[Frame]]:
        """As `entries`, not decoded."""
        rows = self.database.execute(
            "SELECT segments.name, starts, key FROM places JOIN segments ON segment = segments.id "
            "WHERE key IN (SELECT value FROM json_each(?)) " + IN_ORDER,
            (json.dumps(list(keys)),),
        )
        found: dict[int, list[Frame]] = {}
        for key, frame in self._read((name, start, key) for name, starts, key in rows for start in array("Q", starts)):
            found.setdefault(key, []).append(frame)
        return found

    def unfinished(self) -> list[int]:
        """Keys of the episodes that are not final; what was never leased is none."""
        return [key for (key,) in self.database.execute("SELECT key FROM episodes WHERE source IS NULL AND leased")]

    def uncovered(self) -> list[Entry]:
        """The buffer's entries that no checkpoint covers, and the last checkpoint, in order."""
        marks = self.marks()
        last = [mark.number for mark in marks if mark.kind == CHECKPOINTED][-1:]
        wanted = last + [mark.number for mark in marks if mark.kind != CHECKPOINTED]
        return [entry for _, entry in self.buffer_entries(wanted)]

    def buffer_entries(self, numbers: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        """Entries of the buffer with their numbers, in the order of the journal."""
        rows = self.database.execute(
            "SELECT segments.name, start, buffer.id FROM buffer JOIN segments ON segment = segments.id "
            "WHERE buffer.id IN (SELECT value FROM json_each(?)) " + IN_ORDER,
            (json.dumps(list(numbers)),),
        )
        return ((number, unpack(f.schema, f.kind, f.payload)) for number, f in self._read(rows))

    def _add(self, reader: SegmentReader, buffer_limit: int) -> None:
        if reader.header is None:
            self.tears[reader.path] = reader.scan().tear or Tear(0, "the file has no header")
            return
        number, indexed = self._segment(reader)
        if reader.size == indexed:
            return
        scan = reader.scan(indexed, buffer_limit)
        if scan.tear is not None:
            self.tears[reader.path] = scan.tear
        elif scan.end < reader.size:
            self.unread.add(number)
        if scan.end == indexed:
            return
        # The index must not know what a loss of power may still undo.
        reader.sync()
        self.database.execute("UPDATE segments SET indexed = ? WHERE id = ?", (scan.end, number))
        rows = [(key, number, starts[0], starts.tobytes()) for key, starts in sorted(scan.places.items())]
        self.database.executemany("INSERT INTO places VALUES (?, ?, ?, ?)", rows)
        self.database.executemany("INSERT OR IGNORE INTO episodes (key) VALUES (?)", ((row[0],) for row in rows))
        self.database.executemany("UPDATE episodes SET leased = 1 WHERE key = ?", ((key,) for key in scan.leased))
        self.database.executemany(
            "INSERT INTO buffer (segment, start, kind, step) VALUES (?, ?, ?, ?)",
            [(number, start, NUMBERS[type(entry)], step_of(entry)) for start, entry in scan.buffer],
        )

    def _segment(self, reader: SegmentReader) -> tuple[int, int]:
        """A segment's number in the index, and how many bytes of it are known."""
        assert reader.header is not None
        identity, name = reader.header.identity.to_bytes(8, "little"), reader.path.name
        row = self.database.execute("SELECT id, identity, indexed FROM segments WHERE name = ?", (name,)).fetchone()
        if row is None:
            values = (name, number_of(reader.path), identity, HEADER_BYTES)
            added = self.database.execute(
                "INSERT INTO segments (name, number, identity, indexed) VALUES (?, ?, ?, ?)", values
            )
            return int(added.lastrowid or 0), HEADER_BYTES
        if row[1] != identity or reader.size < row[2]:
            raise StaleIndexError(f"{reader.path} is not the segment that the index knows")
        return row[0], row[2]

    def marks(self) -> list[Mark]:
        """The buffer's entries that are not covered, and all checkpoints, in order."""
        rows = self.database.execute(
            "SELECT buffer.id, kind, step FROM buffer JOIN segments ON segment = segments.id "
            "WHERE checkpoint IS NULL " + IN_ORDER
        )
        return [Mark(*row) for row in rows]

    def _settle(self) -> None:
        """Note what checkpoints cover by now, and which episodes are final with that."""
        covered = settle(self.marks())
        self.database.executemany(
            "UPDATE buffer SET checkpoint = ? WHERE id = ?", [(c.checkpoint, c.number) for c in covered]
        )
        checkpoints = {c.number: c.checkpoint for c in covered if c.counts}
        for number, entry in self.buffer_entries(list(checkpoints)):
            self._finish(named_by(entry), number, checkpoints[number])

    def _finish(self, episode_ids: list[str], source: int, checkpoint: int) -> None:
        # What made an episode final first stands: it has been archived as that.
        self.database.executemany(
            "INSERT INTO episodes (key, source, rank, checkpoint) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "source = excluded.source, rank = excluded.rank, checkpoint = excluded.checkpoint WHERE source IS NULL",
            [(signed_key(name), source, rank, checkpoint) for rank, name in enumerate(episode_ids)],
        )

    def _read(self, places: Iterable[tuple[str, int, int]]) -> Iterator[tuple[int, Frame]]:
        """Frames by segment's name, start and what the caller knows them by; each is read from front to back."""
        for name, group in groupby(places, key=itemgetter(0)):
            with SegmentReader(self.folder / name) as reader:
                for _, start, number in sorted(group):
                    yield number, _frame_at(reader, start)


def _frame_at(reader: SegmentReader, start: int) -> Frame:
    frame = reader.frame_at(start)
    if isinstance(frame, Tear):
        raise StaleIndexError(f"{reader.path} does not hold what the index says at {start}")
    return frame


def _sizes(folder: Path) -> dict[Path, int]:
    sizes = {}
    for path in all_segments(folder):
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return sizes


def named_by(entry: Entry) -> list[str]:
    """Episodes that an entry of the buffer makes final once it is covered."""
    if isinstance(entry, Taken):
        return [episode_id for _, episodes in entry.groups for episode_id in episodes]
    return list(entry.episodes) if isinstance(entry, Dropped) else []
