"""What a run's journals say as a whole: read at a start, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
    LeftOut,
    Stepped,
    Taken,
    key_of,
    unpack,
)
from agentrl.journal.frames import Corruption, Frame, TornTail
from agentrl.journal.history import EpisodeHistory, build_history, without_gaps
from agentrl.journal.segments import HEADER_BYTES, number_of, read_frames_at, read_segment, segment_path, writer_of
from agentrl.types.errors import StorageError

COMPACTED = "compacted"


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
    left_out: list[LeftOut] = field(default_factory=list)
    checkpointed: dict[str, int] = field(default_factory=dict)
    torn_tails: dict[Path, TornTail] = field(default_factory=dict)
    damaged: dict[Path, list[Corruption]] = field(default_factory=dict)
    missing: list[Path] = field(default_factory=list)
    distrusted: int = 0

    @property
    def fenced(self) -> int:
        """Entries that count for nothing because their writer had lost its lease."""
        return sum(history.fenced for history in self.lives.values())

    def note(self, entry: Entry) -> None:
        """Take in an entry of the buffer."""
        match entry:
            case Taken():
                self.taken.append(entry)
            case Stepped():
                self.stepped.append(entry)
            case Dropped():
                self.dropped.append(entry)
            case LeftOut():
                self.left_out.append(entry)
            case Checkpointed():
                self.checkpointed = entry.steps

    def add_history(self, entries: list[EpisodeEntry]) -> None:
        """Take in all entries of one episode; without a lease they count for nothing."""
        history = build_history(entries)
        if history is not None:
            self.lives[history.ticket.episode_id] = history


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
            salvaged. A segment at the front of a writer's is missed only where a compacted one says so, and the last
            one never, since only a checkpoint names it: `verify_offsets` misses that.
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


@dataclass(frozen=True, slots=True)
class LiveSegments:
    """The segments that count: the newest `compacted` one, if any, then those of all writers by their numbers.

    `replaced` is up to which number the compacted one replaces each writer's; `superseded` are such segments, and
    older compacted ones, that are still there.
    """

    paths: list[Path]
    compacted: Path | None = None
    replaced: Mapping[str, int] = field(default_factory=dict)
    superseded: Sequence[Path] = ()

    @classmethod
    def of(cls, folder: Path, salvage: bool = False) -> LiveSegments:
        """Those of a folder; with `salvage`, a compacted one that is damaged may not say what it replaces.

        Raises:
            StorageError: what the compacted one replaces cannot be read, and nothing is to be salvaged.
        """
        found = all_segments(folder)
        compacted = max(filter(is_compacted, found), key=lambda path: path.name, default=None)
        replaced: dict[str, int] = {}
        if compacted is not None:
            with suppress(*((StorageError,) if salvage else ())):
                first = next(read_frames_at(compacted, (HEADER_BYTES,)))
                replaced = unpack(first.schema, first.kind, first.payload).replaced
        others = [path for path in found if not is_compacted(path)]
        live = [path for path in others if number_of(path) > replaced.get(writer_of(path), 0)]
        paths = live if compacted is None else [compacted, *live]
        return cls(paths, compacted, replaced, [path for path in found if path not in paths])

    def missing(self) -> list[Path]:
        """Segments between others of the same writer, or behind replaced ones, that are not there."""
        missing: list[Path] = []
        newest = dict(self.replaced)
        for path in self.paths:
            writer, number = writer_of(path), number_of(path)
            between = range(newest.get(writer, number) + 1, number)
            newest[writer] = number
            missing += [segment_path(path.parent, writer, other) for other in between]
        # A folder that is listed while a writer adds to it may show a later name and not an earlier one.
        return [path for path in missing if not path.exists()]

    def check_none_missing(self) -> None:
        """Raises StorageError if a segment between others of its writer is not there."""
        missing = self.missing()
        if missing:
            raise StorageError(
                f"journal segment {missing[0]} is missing although later ones of its writer are there: what was "
                "acknowledged in it is lost; restore the file, or go on without it: `agentrl resume RUN --salvage`"
            )


def all_segments(folder: Path) -> list[Path]:
    """Segments of all writers in the order of their numbers."""
    return sorted(folder.glob("*-????????.journal"), key=lambda path: (number_of(path), path.name))


def is_compacted(path: Path) -> bool:
    """Whether a segment was made from others."""
    return path.name.startswith(f"{COMPACTED}-")


def _pieces(folder: Path, state: JournalState, salvage: bool, disk: Disk) -> Iterator[tuple[str, Frame | Corruption]]:
    """Frames of all writers, each writer's in order, and `Corruption` where acknowledged bytes are passed over."""
    segments = LiveSegments.of(folder, salvage)
    state.missing = segments.missing()
    if not salvage:
        segments.check_none_missing()
    writers = {writer_of(path) for path in segments.paths}
    found = [*segments.paths, *state.missing]
    for path in sorted(found, key=lambda path: (path != segments.compacted, number_of(path))):
        if path in state.missing:
            yield writer_of(path), Corruption(0, 0, "the segment is missing")
            continue
        for piece in read_segment(path, salvage, disk):
            if isinstance(piece, TornTail):
                state.torn_tails[path] = piece
                continue
            if isinstance(piece, Corruption):
                state.damaged.setdefault(path, []).append(piece)
                # Entries of any of them may have stood in a compacted segment.
                yield from ((writer, piece) for writer in (writers if path == segments.compacted else ()))
            yield writer_of(path), piece
