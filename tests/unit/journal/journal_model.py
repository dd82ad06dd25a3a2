"""A naive model of journals: which entry stands at which bytes of which segment, and what its loss takes along."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.journal.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from agentrl.journal.frames import MARK_BYTES
from agentrl.journal.segments import HEADER_BYTES


@dataclass(eq=False)
class Piece:
    """A frame of a segment: an entry of an episode, or a mark."""

    start: int
    end: int
    episode: str = ""
    number: int = 0
    is_lease: bool = False
    is_mark: bool = False


@dataclass(eq=False)
class Segment:
    """A file of a writer.

    `durable` is what the segment behind it says of it; bytes behind `size` cannot be read, and `is_torn` says that
    there are some.
    """

    writer: str
    number: int
    pieces: list[Piece] = field(default_factory=list)
    size: int = HEADER_BYTES
    durable: int = 0
    is_torn: bool = False

    @property
    def name(self) -> str:
        return f"{self.writer}-{self.number:08d}.journal"

    def add(self, payload_bytes: int, **what) -> Piece:
        piece = Piece(self.size, self.size + FRAME_HEADER_BYTES + payload_bytes, **what)
        self.pieces.append(piece)
        self.size = piece.end
        return piece

    def mark(self) -> None:
        self.pieces.append(Piece(self.size, self.size + MARK_BYTES, is_mark=True))
        self.size += MARK_BYTES


@dataclass
class Loss:
    """What spoiling a segment takes: `first` is where acknowledged bytes are lost, None if none are."""

    pieces: list[Piece]
    first: int | None


@dataclass
class JournalModel:
    """All segments, and each episode's entries that count, in order."""

    segments: list[Segment] = field(default_factory=list)
    episodes: dict[str, list[Piece]] = field(default_factory=dict)

    def of(self, writer: str) -> list[Segment]:
        return [segment for segment in self.segments if segment.writer == writer]

    def spoil(self, segment: Segment, start: int, end: int) -> Loss:
        """Bytes of a segment become others."""
        hit = [piece for piece in segment.pieces if piece.start < end and piece.end > start]
        marks = [piece.start for piece in segment.pieces if piece.is_mark and piece not in hit]
        proven = max([segment.durable, *marks])
        if start < HEADER_BYTES and not marks:
            return Loss(segment.pieces, 0 if segment.size > HEADER_BYTES or segment.durable else None)
        torn = min((piece.start for piece in hit if piece.start >= proven), default=segment.size)
        lost = [piece for piece in segment.pieces if piece in hit or piece.start >= torn]
        first = [piece.start for piece in hit if piece.start < proven] + [0] * (start < HEADER_BYTES)
        return Loss(lost, min(first, default=None))

    def kept(self, segment: Segment, loss: Loss) -> dict[str, list[int]]:
        """The numbers of each episode's entries that a salvage keeps."""
        kept = {name: self._kept(entries, segment, loss) for name, entries in self.episodes.items()}
        return {name: numbers for name, numbers in kept.items() if numbers}

    def _kept(self, entries: list[Piece], segment: Segment, loss: Loss) -> list[int]:
        behind = [other for other in self.of(segment.writer) if other.number > segment.number]
        distrusted = [piece for other in behind for piece in other.pieces]
        distrusted += [piece for piece in segment.pieces if loss.first is not None and piece.start >= loss.first]
        numbers: list[int] = []
        has_lease = False
        for piece in entries:
            has_lease |= piece in distrusted and piece.is_lease
            if piece in loss.pieces or (loss.first is not None and piece in distrusted and not has_lease):
                break
            numbers.append(piece.number)
        return numbers
