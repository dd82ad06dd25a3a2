"""How far each segment is durable: a checkpoint notes it, so that a resume finds out if an end was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.journal.frames import Corruption, TornTail
from agentrl.journal.segments import corruption_error, number_of, segment_paths, writer_of
from agentrl.types.errors import StorageError


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """A writer's newest segment and how many of its bytes are durable.

    Example: ``SegmentEnd("worker-0-00000003.journal", 4096)``.
    """

    name: str
    end_bytes: int

    @property
    def writer(self) -> str:
        """Whose segment it is."""
        return writer_of(Path(self.name))

    @property
    def number(self) -> int:
        """The segment's number."""
        return number_of(Path(self.name))


def verify_offsets(folder: Path, ends: Iterable[SegmentEnd], torn_tails: Mapping[Path, TornTail]) -> None:
    """Raise if durable data is missing; `torn_tails` are those that reading the segments found.

    A writer's newest segment is never replaced, so either the segment that was noted is there, or a later one of its
    writer.

    Raises:
        StorageError: neither is there, or the segment ends before what was durable of it.
    """
    for end in ends:
        path = folder / end.name
        if path.exists():
            _check_end(path, end.end_bytes, torn_tails.get(path))
        elif not any(number_of(other) > end.number for other in segment_paths(folder, end.writer)):
            raise StorageError(
                f"journal segment {path} is missing although the newest checkpoint names it: what was acknowledged in "
                "it is lost; restore the file from a copy, or go on without it: `agentrl resume RUN --salvage`"
            )


def _check_end(path: Path, end_bytes: int, torn_tail: TornTail | None) -> None:
    size_bytes = path.stat().st_size
    readable_bytes = size_bytes if torn_tail is None else min(size_bytes, torn_tail.at)
    if readable_bytes < end_bytes:
        reason = "the newest checkpoint knows more of it"
        raise corruption_error(path, Corruption(readable_bytes, end_bytes, reason))
