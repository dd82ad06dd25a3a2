"""What a worker that is gone has left on record, for those who go on with its episodes while the run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.journal.entries import EpisodeEntry, episode_key, key_of, pack, unpack
from agentrl.journal.frames import Frame
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.reading import LiveSegments, is_compacted
from agentrl.journal.segments import number_of, read_segment, segment_paths, writer_of
from agentrl.types.errors import StorageError
from agentrl.types.rollout import PackedEntry

_TRIES = 5


def newest_segment(folder: Path, writer: str) -> int:
    """Number of a writer's newest segment; 0 without one."""
    return max(map(number_of, segment_paths(folder, writer)), default=0)


def read_held(folder: Path, writer: str, after: int, tokens: Mapping[str, int]) -> dict[str, list[PackedEntry]]:
    """Entries of some episodes by name, in order, in a writer's segments behind number `after`.

    Only those that it wrote under the token by which it held the episode last. The writer must have ended: what is
    read is durable from here on, and what it may still append does not count. Some of it may be in a compacted segment
    by now; one that is made and takes others' place meanwhile is read instead.

    Raises:
        StorageError: a segment cannot be read, or is damaged.
    """
    error: StorageError | None = None
    for _ in range(_TRIES):
        try:
            paths = _segments(folder, writer, after)
            held = _read(paths, tokens)
            if _segments(folder, writer, after) == paths:
                return held
        except StorageError as caught:  # of a segment that is gone by now, or really
            error = caught
    raise error or StorageError(f"journal {folder} was compacted {_TRIES} times while it was read; resume the run")


def _segments(folder: Path, writer: str, after: int) -> list[Path]:
    """Those that may have entries that a writer made behind a number: its own, and one made of others."""
    return [
        path
        for path in LiveSegments.of(folder).paths
        if is_compacted(path) or (writer_of(path) == writer and number_of(path) > after)
    ]


def _read(paths: Iterable[Path], tokens: Mapping[str, int]) -> dict[str, list[PackedEntry]]:
    names = {episode_key(name): name for name in tokens}
    held: dict[str, list[PackedEntry]] = {name: [] for name in tokens}
    for path in paths:
        for frame in (piece for piece in read_segment(path) if isinstance(piece, Frame)):
            name = names.get(key_of(frame.payload))
            if name is not None and unpack(frame.schema, frame.kind, frame.payload).token == tokens[name]:
                held[name].append((frame.schema, frame.kind, bytes(frame.payload)))
    return held


def pack_entries(episode_id: str, entries: Iterable[EpisodeEntry]) -> tuple[PackedEntry, ...]:
    """Entries of an episode as the journal holds them."""
    return tuple(pack(episode_id, entry) for entry in entries)


def unpack_history(entries: Iterable[PackedEntry]) -> EpisodeHistory | None:
    """What entries of one episode say; None without a lease. Raises StorageError."""
    return build_history([unpack(*entry) for entry in entries])
