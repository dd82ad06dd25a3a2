"""Where each episode's entries lie and which episodes are final: one scan of the segments, whenever it is needed.

Compaction keeps the segments few, so a scan takes a fraction of a second, and nothing has to be kept in step with them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.journal.entries import (
    KINDS,
    NO_EPISODE,
    NUMBERS,
    SCHEMA,
    Checkpointed,
    Compacted,
    Entry,
    Leased,
    episode_key,
    key_of,
    unpack,
)
from agentrl.journal.finality import committed, named_by
from agentrl.journal.frames import Frame, TornTail
from agentrl.journal.reading import JournalState, LiveSegments, all_segments
from agentrl.journal.segments import read_frames_at, read_segment

_LEASED = NUMBERS[Leased]


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
        StorageError: a segment cannot be read, is damaged or missing, or is of a newer program.
    """
    return JournalIndex(folder).state()


class JournalIndex:
    """A journal as its segments are now, which may be written meanwhile.

    `places` says by episode's key in which segments its entries begin where, `leased` which of the episodes have a
    lease. `buffer` holds the buffer's entries in order, `covered` the place of the checkpoint that covers each, `final`
    the episodes that are final. `partial` are the places of covered entries by which some of an episode's policies are
    done with it, `sources` those of all such entries by episode. `torn_tails` are the ends of segments that cannot be
    read; of `unread` segments some was left for another time.
    """

    def __init__(self, folder: Path) -> None:
        """Raises StorageError if a segment cannot be read, is damaged or missing, or of a newer program."""
        self.places: dict[int, dict[Path, array[int]]] = {}
        self.leased: set[int] = set()
        self.buffer: list[BufferEntry] = []
        self.covered: dict[int, int] = {}
        self.final: dict[int, Final] = {}
        self.partial: set[int] = set()
        self.sources: dict[int, set[int]] = {}
        self.torn_tails: dict[Path, TornTail] = {}
        self.unread: set[Path] = set()
        # Whoever is in the buffer's entries up to here has its own entries on disk already: reading to the ends of
        # the files, as they are later, finds them. Entries of the buffer behind that wait for another time.
        sizes = _sizes(folder)
        self.segments = LiveSegments.of(folder)
        self.segments.check_none_missing()
        for path in self.segments.paths:
            is_whole = path == self.segments.compacted
            self._scan(path, path.stat().st_size if is_whole else sizes.get(path, 0))
        self._find_final()

    def state(self) -> JournalState:
        """What is not final."""
        state = JournalState(torn_tails=self.torn_tails)
        for frames in self.frames(self.unfinished).values():
            state.add_history([unpack(frame.schema, frame.kind, frame.payload) for frame in frames])
        for place in sorted({*self.waiting, *self.partial, *self.checkpoints[-1:]}):
            state.note(self.buffer[place].entry)
        return state

    @property
    def unfinished(self) -> list[int]:
        """Keys of the episodes that are not final."""
        return [key for key in self.places if key in self.leased and key not in self.final]

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
        by_segment: dict[Path, list[int]] = {}
        for key in keys:
            for path, starts in self.places.get(key, {}).items():
                by_segment.setdefault(path, []).extend(starts)
        found: dict[int, list[Frame]] = {}
        for path in self.segments.paths:
            for frame in read_frames_at(path, sorted(by_segment.get(path, ()))):
                found.setdefault(key_of(frame.payload), []).append(frame)
        return found

    def _scan(self, path: Path, buffer_limit: int) -> None:
        """Find all that lies in a segment; stops before an entry of the buffer at `buffer_limit` or behind it."""
        places: dict[int, array[int]] = defaultdict(lambda: array("Q"))
        for piece in read_segment(path):
            if not isinstance(piece, Frame):
                assert isinstance(piece, TornTail), "damage is raised"
                self.torn_tails[path] = piece
                break
            key = key_of(piece.payload)
            is_known = piece.kind in KINDS and piece.schema <= SCHEMA
            if key != NO_EPISODE and is_known:
                places[key].append(piece.start)
                if piece.kind == _LEASED:
                    self.leased.add(key)
                continue
            if piece.start >= buffer_limit and is_known:
                self.unread.add(path)
                break
            entry = unpack(piece.schema, piece.kind, piece.payload)
            if not isinstance(entry, Compacted):
                self.buffer.append(BufferEntry(path, piece.start, entry))
        for key, starts in places.items():
            self.places.setdefault(key, {})[path] = starts

    def _find_final(self) -> None:
        """An episode is final by the entry that makes it so: once every policy that trains it is done with it."""
        done: dict[int, dict[str, int]] = {}
        for place, checkpoint, is_committed in committed([found.entry for found in self.buffer]):
            self.covered[place] = checkpoint
            for rank, (name, policy, policies) in enumerate(named_by(self.buffer[place].entry) if is_committed else ()):
                key = episode_key(name)
                of_episode = done.setdefault(key, {})
                of_episode[policy] = place
                # What made an episode final first stands: it has been archived as that.
                if of_episode.keys() >= set(policies):
                    self.final.setdefault(key, Final(place, rank, checkpoint))
        for key, of_episode in done.items():
            self.sources[key] = set(of_episode.values())
            if key not in self.final:
                self.partial |= self.sources[key]


def _sizes(folder: Path) -> dict[Path, int]:
    sizes = {}
    for path in all_segments(folder):
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return sizes
