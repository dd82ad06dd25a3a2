"""What a run's journals say as a whole: read at a start, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.journal.disk import DISK, Disk
from agentrl.journal.entries import (
    NO_EPISODE,
    Checkpointed,
    Dropped,
    Entry,
    EpisodeEntry,
    Leased,
    Stepped,
    Taken,
    key_of,
    unpack,
)
from agentrl.journal.frames import Corruption, Frame, TornTail
from agentrl.journal.history import EpisodeHistory, build_history, without_gaps
from agentrl.journal.segments import number_of, read_segment, segment_path, writer_of
from agentrl.types.errors import StorageError


@dataclass(slots=True)
class JournalState:
    """Every episode that the journals know by name, and what the buffer did, in order.

    `torn_tails` are ends of segments that a crash cut off, by file: nothing in them was acknowledged. `damaged` and
    `missing` are acknowledged bytes that a salvage went on without, and `distrusted` counts entries that it could
    read and left out, since an earlier one of the same episode may be among those.
    """

    lives: dict[str, EpisodeHistory] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    stepped: list[Stepped] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    checkpointed: int | None = None
    torn_tails: dict[Path, TornTail] = field(default_factory=dict)
    damaged: dict[Path, list[Corruption]] = field(default_factory=dict)
    missing: list[Path] = field(default_factory=list)
    distrusted: int = 0

    @property
    def fenced(self) -> int:
        """Entries that count for nothing because their writer had lost its lease."""
        return sum(life.fenced for life in self.lives.values())

    def note(self, entry: Entry) -> None:
        """Take in an entry of the buffer."""
        match entry:
            case Taken():
                self.taken.append(entry)
            case Stepped():
                self.stepped.append(entry)
            case Dropped():
                self.dropped.append(entry)
            case Checkpointed():
                self.checkpointed = entry.step

    def add_history(self, entries: list[EpisodeEntry]) -> None:
        """Take in all entries of one episode; without a lease they count for nothing."""
        life = build_history(entries)
        if life is not None:
            self.lives[life.ticket.episode_id] = life


class _Trust:
    """Which entries still count once acknowledged ones are lost: none that may lack the one before it.

    An episode that goes on from a turn which is not there would be trained as something that never happened, so it is
    cut where it may have a gap. Told of each writer's entries in the order of its segments.

    Example: behind a loss, an episode counts again from the lease that its writer takes next.
    """

    def __init__(self) -> None:
        self._leased_since: dict[str, set[int]] = {}

    @property
    def has_lost(self) -> bool:
        """Whether any writer has."""
        return bool(self._leased_since)

    def lose(self, writer: str) -> None:
        """Some entries of this writer, of any episodes, stood here."""
        self._leased_since[writer] = set()

    def may_count(self, writer: str, key: int, entry: EpisodeEntry) -> bool:
        """Whether nothing that its writer has lost stood between this entry and its lease."""
        leased = self._leased_since.get(writer)
        if leased is None:
            return True
        if isinstance(entry, Leased):
            leased.add(key)
        return key in leased


def read_journal(folder: Path, salvage: bool = False, disk: Disk = DISK) -> JournalState:
    """Read all segments in a folder; what is read is durable from here on, see `Disk.read`.

    With `salvage`, what is damaged or missing is passed over: all entries before it are kept, and those behind it
    of episodes that cannot have lost one.

    Raises:
        StorageError: a segment cannot be read, is of a newer program, or is damaged or missing and not to be
            salvaged. A segment at the front of a writer's is not missed, since pruning removes those, nor is the
            last one, which only a checkpoint names: `verify_offsets` misses that.
    """
    state = JournalState()
    entries: dict[int, list[EpisodeEntry]] = {}
    trust = _Trust()
    for writer, piece in _pieces(folder, state, salvage, disk):
        if isinstance(piece, Corruption):
            trust.lose(writer)
            continue
        entry, key = unpack(piece.schema, piece.kind, piece.payload), key_of(piece.payload)
        if key == NO_EPISODE:
            state.note(entry)
        elif trust.may_count(writer, key, entry):
            entries.setdefault(key, []).append(entry)
        else:
            state.distrusted += 1
    for found in entries.values():
        kept = without_gaps(found) if trust.has_lost else found
        state.distrusted += len(found) - len(kept)
        state.add_history(kept)
    return state


def all_segments(folder: Path) -> list[Path]:
    """Segments of all writers in the order of their numbers."""
    return sorted(folder.glob("*-????????.journal"), key=segment_order)


def segment_order(path: Path) -> tuple[int, str]:
    """Puts segments in the order of the journal."""
    return number_of(path), path.name


def missing_segments(segments: list[Path]) -> list[Path]:
    """Segments between others of the same writer that are not there."""
    missing: list[Path] = []
    newest: dict[str, int] = {}
    for path in segments:
        writer, number = writer_of(path), number_of(path)
        between = range(newest.get(writer, number) + 1, number)
        newest[writer] = number
        missing += [segment_path(path.parent, writer, other) for other in between]
    # A folder that is listed while a writer adds to it may show a later name and not an earlier one.
    return [path for path in missing if not path.exists()]


def check_none_missing(segments: list[Path]) -> None:
    """Raises StorageError if a segment between others of its writer is not there."""
    missing = missing_segments(segments)
    if missing:
        raise StorageError(
            f"journal segment {missing[0]} is missing although later ones of its writer are there: what was "
            "acknowledged in it is lost; restore the file, or go on without it: `agentrl resume RUN --salvage`"
        )


def _pieces(folder: Path, state: JournalState, salvage: bool, disk: Disk) -> Iterator[tuple[str, Frame | Corruption]]:
    """Frames of all writers, each writer's in order, and `Corruption` where acknowledged bytes are passed over."""
    segments = all_segments(folder)
    state.missing = missing_segments(segments)
    if not salvage:
        check_none_missing(segments)
    for path in sorted((*segments, *state.missing), key=number_of):
        if path in state.missing:
            yield writer_of(path), Corruption(0, 0, "the segment is missing")
            continue
        for piece in read_segment(path, salvage, disk):
            if isinstance(piece, TornTail):
                state.torn_tails[path] = piece
                continue
            if isinstance(piece, Corruption):
                state.damaged.setdefault(path, []).append(piece)
            yield writer_of(path), piece
