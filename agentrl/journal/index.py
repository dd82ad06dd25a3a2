"""Where each episode's entries lie and which episodes are final: read from the segments whenever it is needed.

Pruning keeps the segments few, so reading them takes seconds at most, and nothing has to be kept in step with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.journal.entries import Checkpointed, Dropped, Entry, Taken, episode_key, unpack
from agentrl.journal.finality import committed
from agentrl.journal.frames import Frame, TornTail
from agentrl.journal.reading import JournalState, all_segments, check_none_missing, segment_order
from agentrl.journal.scanning import SegmentReader
from agentrl.types.errors import StorageError


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """An entry of the buffer and where it stands."""

    segment: Path
    start: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Final:
    """What made an episode final: the place of an entry in the buffer's, of the episode in that entry, and of the
    checkpoint that covers it.
    """

    source: int
    rank: int
    checkpoint: int


def open_journal(folder: Path) -> JournalState:
    """What is not final: the episodes that are neither trained nor dropped for good, and what no checkpoint covers.

    Equal to `read_journal` without what is final (`finality` has the rule), and decodes nothing of that.

    Raises:
        StorageError: a segment cannot be read or is of a newer program.
    """
    return JournalIndex(folder).state()


class JournalIndex:
    """A journal as its segments are now, which may be written meanwhile.

    `identities` are those of the segments, in the order of the journal. `places` says by episode's key in which
    segments its entries begin where, `leased` which of the episodes have a lease. `buffer` holds the buffer's entries
    in order, `covered` the place of the checkpoint that covers each, `final` the episodes that are final. `torn_tails`
    are the ends of segments that cannot be read; of `unread` segments some was left for another time.
    """

    def __init__(self, folder: Path) -> None:
        """Raises StorageError if a segment cannot be read, is damaged or missing, or of a newer program."""
        self.identities: dict[Path, int] = {}
        self.places: dict[int, dict[Path, array[int]]] = {}
        self.leased: set[int] = set()
        self.buffer: list[BufferEntry] = []
        self.covered: dict[int, int] = {}
        self.final: dict[int, Final] = {}
        self.torn_tails: dict[Path, TornTail] = {}
        self.unread: set[Path] = set()
        # Whoever is in the buffer's entries up to here has its own entries on disk already: reading to the ends of
        # the files, as they are later, finds them. Entries of the buffer behind that wait for another time.
        sizes = _sizes(folder)
        paths = all_segments(folder)
        check_none_missing(paths)
        for path in paths:
            with SegmentReader(path) as reader:
                self._add(reader, sizes.get(path, 0))
        self._find_final()

    def state(self) -> JournalState:
        """What is not final."""
        state = JournalState(torn_tails=self.torn_tails)
        unfinished = [key for key in self.places if key in self.leased and key not in self.final]
        for frames in self.frames(unfinished).values():
            state.add_history([unpack(frame.schema, frame.kind, frame.payload) for frame in frames])
        for entry in self.uncovered():
            state.note(entry)
        return state

    def uncovered(self) -> list[Any]:
        """The buffer's entries that no checkpoint covers, and the last checkpoint, in order."""
        return [self.buffer[place].entry for place in sorted({*self.waiting, *self.checkpoints[-1:]})]

    @property
    def checkpoints(self) -> list[int]:
        """Places of the checkpoints among the buffer's entries."""
        return [place for place, found in enumerate(self.buffer) if isinstance(found.entry, Checkpointed)]

    @property
    def waiting(self) -> list[int]:
        """Places of the buffer's entries that no checkpoint covers."""
        places = enumerate(self.buffer)
        return [p for p, found in places if p not in self.covered and not isinstance(found.entry, Checkpointed)]

    def frames(self, keys: Iterable[int]) -> dict[int, list[Frame]]:
        """What the journal holds of some episodes, by key, in the order of the journal. Raises StorageError."""
        by_segment: dict[Path, list[tuple[int, int]]] = {}
        for key in keys:
            for path, starts in self.places.get(key, {}).items():
                by_segment.setdefault(path, []).extend((start, key) for start in starts)
        found: dict[int, list[Frame]] = {}
        for path in sorted(by_segment, key=segment_order):
            with SegmentReader(path) as reader:
                for start, key in sorted(by_segment[path]):
                    found.setdefault(key, []).append(_frame_at(reader, start))
        return found

    def _add(self, reader: SegmentReader, buffer_limit: int) -> None:
        scan = reader.scan(buffer_limit)
        if scan.torn_tail is not None:
            self.torn_tails[reader.path] = scan.torn_tail
        elif scan.end < reader.size:
            self.unread.add(reader.path)
        if reader.header is None:
            return
        # Nobody must go on from what a loss of power may still undo.
        reader.sync()
        self.identities[reader.path] = reader.header.identity
        for key, starts in scan.places.items():
            self.places.setdefault(key, {})[reader.path] = starts
        self.leased.update(scan.leased)
        self.buffer += [BufferEntry(reader.path, start, entry) for start, entry in scan.buffer]

    def _find_final(self) -> None:
        for place, checkpoint, is_committed in committed([found.entry for found in self.buffer]):
            self.covered[place] = checkpoint
            # What made an episode final first stands: it has been archived as that.
            for rank, name in enumerate(_named_by(self.buffer[place].entry) if is_committed else ()):
                self.final.setdefault(episode_key(name), Final(place, rank, checkpoint))


def _frame_at(reader: SegmentReader, start: int) -> Frame:
    frame = reader.frame_at(start)
    if isinstance(frame, TornTail):
        raise StorageError(f"journal segment {reader.path} has changed at {start} since it was scanned: {frame.reason}")
    return frame


def _sizes(folder: Path) -> dict[Path, int]:
    sizes = {}
    for path in all_segments(folder):
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return sizes


def _named_by(entry: Entry) -> list[str]:
    """Episodes that an entry of the buffer makes final once it is covered."""
    if isinstance(entry, Taken):
        return [episode_id for _, episodes in entry.groups for episode_id in episodes]
    return list(entry.episodes) if isinstance(entry, Dropped) else []
