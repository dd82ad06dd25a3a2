"""What the index says of episodes that are over for good, and of the segments that only they still need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentrl.journal.index import IN_ORDER, JournalIndex
from agentrl.journal.segments import number_of
from agentrl.journal.settling import CHECKPOINTED
from agentrl.types.errors import StorageError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A `Checkpointed` of the journal by its place; the identity is of the segment, which may be gone by now."""

    segment: str
    start: int
    step: int
    identity: bytes

    @property
    def place(self) -> tuple[int, str, int]:
        """Orders checkpoints as the journal does."""
        return number_of(Path(self.segment)), self.segment, self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as the index knows it, by the index's own number `id`."""

    id: int
    name: str
    number: int
    has_buffer: bool

    @property
    def writer(self) -> str:
        """Name of its writer."""
        return self.name.rpartition("-")[0]


def last_checkpoint(journal: JournalIndex) -> Checkpoint | None:
    """The last checkpoint of the journal."""
    checkpoints = _checkpoints(journal)
    return list(checkpoints.values())[-1] if checkpoints else None


def consumed(journal: JournalIndex, after: Checkpoint | None) -> list[tuple[int, int]]:
    """Episodes that a checkpoint behind `after` made final: key, and number of the buffer's entry that names it.

    In the order in which they were trained or dropped. Raises StorageError if `after` is another journal's.
    """
    rows = journal.database.execute(
        "SELECT key, source FROM episodes JOIN buffer ON source = buffer.id JOIN segments ON segment = segments.id "
        "WHERE leased AND episodes.checkpoint IN (SELECT value FROM json_each(?)) " + IN_ORDER + ", rank",
        (json.dumps(_behind(journal, after)),),
    )
    return [(key, source) for key, source in rows]


def held(journal: JournalIndex, after: Checkpoint | None) -> set[int]:
    """Segments that are still needed once all is archived that checkpoints up to `after` made final.

    In them lies an episode that is not final or not archived, an entry that no checkpoint covers, the last
    checkpoint, or something that the index has not read. Raises StorageError if `after` is another journal's.
    """
    by_episodes = journal.database.execute(
        "SELECT DISTINCT segment FROM places JOIN episodes USING (key) "
        "WHERE leased AND (source IS NULL OR checkpoint IN (SELECT value FROM json_each(?)))",
        (json.dumps(_behind(journal, after)),),
    )
    last = list(_checkpoints(journal))[-1:]
    waiting = [mark.number for mark in journal.marks() if mark.kind != CHECKPOINTED]
    by_buffer = journal.database.execute(
        "SELECT DISTINCT segment FROM buffer WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(last + waiting),),
    )
    return journal.unread | _numbers(by_episodes) | _numbers(by_buffer)


def tied_to(journal: JournalIndex, segment: int) -> set[int]:
    """Segments with entries of episodes that this segment's entries make final."""
    return _numbers(
        journal.database.execute(
            "SELECT DISTINCT places.segment FROM buffer JOIN episodes ON source = buffer.id "
            "JOIN places USING (key) WHERE buffer.segment = ?",
            (segment,),
        )
    )


def known_segments(journal: JournalIndex) -> list[Segment]:
    """All segments in the order of the journal."""
    rows = journal.database.execute(
        "SELECT id, name, number, EXISTS (SELECT 1 FROM buffer WHERE segment = segments.id) FROM segments "
        "ORDER BY number, name"
    )
    return [Segment(number, name, ordinal, bool(has)) for number, name, ordinal, has in rows]


def forget(journal: JournalIndex, segments: set[int]) -> None:
    """Strike out segments that have been deleted, and episodes that were wholly in them."""
    if not segments:
        return
    gone = json.dumps(sorted(segments))
    for table, column in (("places", "segment"), ("buffer", "segment"), ("segments", "id")):
        journal.database.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))", (gone,))
    journal.database.execute("DELETE FROM episodes WHERE NOT EXISTS (SELECT 1 FROM places WHERE key = episodes.key)")


def _checkpoints(journal: JournalIndex) -> dict[int, Checkpoint]:
    """Checkpoints by the number of their entry, in order."""
    rows = journal.database.execute(
        "SELECT buffer.id, segments.name, start, step, identity FROM buffer "
        "JOIN segments ON segment = segments.id WHERE kind = ? " + IN_ORDER,
        (CHECKPOINTED,),
    )
    return {number: Checkpoint(*row) for number, *row in rows}


def _behind(journal: JournalIndex, after: Checkpoint | None) -> list[int]:
    """Numbers of the checkpoints behind one."""
    checkpoints = _checkpoints(journal)
    if after is None:
        return list(checkpoints)
    segments = journal.database.execute("SELECT identity FROM segments WHERE name = ?", (after.segment,))
    if any(identity != after.identity for (identity,) in segments):
        raise StorageError(f"the archive is not of the journal {journal.folder}; give it a folder of its own")
    return [number for number, checkpoint in checkpoints.items() if checkpoint.place > after.place]


def _numbers(rows: Iterable[tuple[int]]) -> set[int]:
    return {number for (number,) in rows}
