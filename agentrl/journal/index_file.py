"""The index as a file: checksummed as a whole, replaced as a whole, never locked.

Work happens on a draft, a copy beside it, which replaces the index by a rename once it is complete. So no process
waits for another or sees a half-made index, on shared storage too; if two update it at once, either result is right,
since both follow from the segments. The checksum stands behind the last page, where SQLite does not look. A flipped
bit would otherwise hide an episode.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TypeVar

import xxhash

from agentrl.types.errors import StorageError

T = TypeVar("T")
SCHEMA = 1
ABANDONED_AFTER_S = 3600
_CHECKSUM_BYTES = 8
_PIECE_BYTES = 2**20
_TABLES = f"""
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA locking_mode = EXCLUSIVE; PRAGMA cache_size = -65536;
PRAGMA user_version = {SCHEMA};
BEGIN;
CREATE TABLE segments (id INTEGER PRIMARY KEY, name TEXT UNIQUE, number INTEGER, identity BLOB, indexed INTEGER);
CREATE TABLE places (
    key INTEGER, segment INTEGER, start INTEGER, starts BLOB, PRIMARY KEY (key, segment, start)
) WITHOUT ROWID;
CREATE TABLE buffer (
    id INTEGER PRIMARY KEY, segment INTEGER, start INTEGER, kind INTEGER, step INTEGER, checkpoint INTEGER
);
CREATE TABLE episodes (key INTEGER PRIMARY KEY, leased INTEGER, source INTEGER, rank INTEGER, checkpoint INTEGER);
CREATE INDEX unfinished ON episodes (key) WHERE source IS NULL;
"""
_OPENING = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA locking_mode = EXCLUSIVE; PRAGMA cache_size = -65536;
BEGIN;
"""


class StaleIndexError(StorageError):
    """The index does not belong to these segments."""


def with_database(path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
    """Do some work on the index at `path`, and do it again on an empty one if the index turns out to be wrong.

    The work raises StaleIndexError if it finds that out. What it changed is kept unless it raises.

    Raises:
        StorageError: the disk is full or not writable, or the work failed on an empty index as well.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.callback(draft.unlink, missing_ok=True)
            return _attempt(draft, path, work)
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"the journal's index {path} cannot be written: {error}; free space there") from error


def _attempt(draft: Path, path: Path, work: Callable[[sqlite3.Connection], T]) -> T:
    _remove_abandoned(path)
    with suppress(StaleIndexError, sqlite3.DatabaseError):
        if _copy_if_whole(path, draft):
            return _work_on(draft, path, _OPENING, work)
    draft.unlink(missing_ok=True)
    return _work_on(draft, path, _TABLES, work)


def _work_on(draft: Path, path: Path, opening: str, work: Callable[[sqlite3.Connection], T]) -> T:
    with closing(sqlite3.connect(draft, isolation_level=None)) as database:
        database.executescript(opening)
        if database.execute("PRAGMA user_version").fetchone() != (SCHEMA,):
            raise StaleIndexError(f"{path} is an index of another schema")
        before = database.total_changes
        result = work(database)
        is_changed = database.total_changes > before
        database.execute("COMMIT")
    if is_changed:
        _put_in_place(draft, path)
    return result


def _put_in_place(draft: Path, path: Path) -> None:
    digest = xxhash.xxh3_64()
    with draft.open("r+b") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        file.write(digest.digest())
    # Another process may have taken the draft for abandoned; then the index is brought up to date next time.
    with suppress(FileNotFoundError):
        draft.replace(path)


def _copy_if_whole(path: Path, draft: Path) -> bool:
    """Copy the index without its checksum; false if there is none, or not as it was written."""
    if not path.exists():
        return False
    digest = xxhash.xxh3_64()
    with path.open("rb") as file, draft.open("wb") as copy:
        left = os.fstat(file.fileno()).st_size - _CHECKSUM_BYTES
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            copy.write(piece)
            left -= len(piece)
        return file.read() == digest.digest()


def _remove_abandoned(path: Path) -> None:
    """Drafts of processes that were killed."""
    for draft in path.parent.glob(f"{path.name}.*.new"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > ABANDONED_AFTER_S:
                draft.unlink()
