"""Which episodes are to be archived, and which segments are still needed once they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.journal.entries import Checkpointed
from agentrl.journal.index import JournalIndex
from agentrl.journal.segments import number_of
from agentrl.types.errors import StorageError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A `Checkpointed` of the journal by its place; the identity is of the segment, which may be gone by now."""

    segment: str
    start: int
    step: int
    identity: int

    @property
    def place(self) -> tuple[int, str, int]:
        """Orders checkpoints as the journal does."""
        return number_of(Path(self.segment)), self.segment, self.start


def last_checkpoint(journal: JournalIndex) -> Checkpoint | None:
    """The last checkpoint of the journal."""
    places = journal.checkpoints
    return _checkpoint(journal, places[-1]) if places else None


def consumed(journal: JournalIndex, after: Checkpoint | None) -> list[int]:
    """Keys of the episodes that a checkpoint behind `after` made final.

    In the order in which they were trained or dropped. Raises StorageError if `after` is another journal's.
    """
    behind = _behind(journal, after)
    keys = [key for key, final in journal.final.items() if key in journal.leased and final.checkpoint in behind]
    return sorted(keys, key=lambda key: (journal.final[key].source, journal.final[key].rank))


def held(journal: JournalIndex, after: Checkpoint | None) -> set[Path]:
    """Segments that are still needed once all is archived that checkpoints up to `after` made final.

    In them lies an episode that is not final or not archived, an entry that no checkpoint covers, the last
    checkpoint, or something that was not read. Raises StorageError if `after` is another journal's.
    """
    behind = _behind(journal, after)
    needed = set(journal.unread)
    for key in journal.leased:
        final = journal.final.get(key)
        if final is None or final.checkpoint in behind:
            needed.update(journal.places[key])
    return needed | {journal.buffer[place].segment for place in (*journal.waiting, *journal.checkpoints[-1:])}


def tied_to(journal: JournalIndex) -> dict[Path, set[Path]]:
    """By segment, those with entries of episodes that its entries make final."""
    tied: dict[Path, set[Path]] = {found.segment: set() for found in journal.buffer}
    for key, final in journal.final.items():
        tied[journal.buffer[final.source].segment].update(journal.places.get(key, ()))
    return tied


def _checkpoint(journal: JournalIndex, place: int) -> Checkpoint:
    found = journal.buffer[place]
    assert isinstance(found.entry, Checkpointed)
    return Checkpoint(found.segment.name, found.start, found.entry.step, journal.identities[found.segment])


def _behind(journal: JournalIndex, after: Checkpoint | None) -> set[int]:
    """Places of the checkpoints behind one."""
    if after is None:
        return set(journal.checkpoints)
    for path, identity in journal.identities.items():
        if path.name == after.segment and identity != after.identity:
            raise StorageError(f"the archive is not of the journal {path.parent}; give it a folder of its own")
    return {place for place in journal.checkpoints if _checkpoint(journal, place).place > after.place}
