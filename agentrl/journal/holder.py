"""What is on record of some episodes, read while the run goes on: for those who go on with them, or count them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from agentrl.journal.entries import EpisodeEntry, episode_key, key_of, pack, unpack
from agentrl.journal.frames import Frame
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.reading import LiveSegments, is_compacted
from agentrl.journal.segments import number_of, read_segment, segment_paths, writer_of
from agentrl.types.episode import Episode
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
    entries = _read(folder, tokens, lambda path: writer_of(path) == writer and number_of(path) > after)
    return {
        name: [entry for entry in of_episode if unpack(*entry).token == tokens[name]]
        for name, of_episode in entries.items()
    }


def read_played(folder: Path, names: Collection[str]) -> dict[str, Episode]:
    """Some episodes by name, as far as they were played; without those that no writer has begun.

    Their writers must have ended. Raises StorageError if a segment cannot be read, or is damaged.
    """
    return {name: history.episode() for name, history in read_histories(folder, names).items()}


def read_histories(folder: Path, names: Collection[str]) -> dict[str, EpisodeHistory]:
    """What is on record of some episodes that nobody plays any more, by name; without those that no writer has begun.

    Raises StorageError if a segment cannot be read, or is damaged.
    """
    found = {name: unpack_history(entries) for name, entries in _read(folder, names, lambda path: True).items()}
    return {name: history for name, history in found.items() if history is not None}


def _read(folder: Path, names: Collection[str], chosen: Callable[[Path], bool]) -> dict[str, list[PackedEntry]]:
    """Entries of episodes by name, in order, in the chosen segments and in one that was made of others."""
    error: StorageError | None = None
    for _ in range(_TRIES):
        try:
            paths = [path for path in LiveSegments.of(folder).paths if is_compacted(path) or chosen(path)]
            found = _entries(paths, names)
            if [path for path in LiveSegments.of(folder).paths if is_compacted(path) or chosen(path)] == paths:
                return found
        except StorageError as caught:  # of a segment that is gone by now, or really
            error = caught
    raise error or StorageError(f"journal {folder} was compacted {_TRIES} times while it was read; resume the run")


def _entries(paths: Iterable[Path], names: Collection[str]) -> dict[str, list[PackedEntry]]:
    by_key = {episode_key(name): name for name in names}
    found: dict[str, list[PackedEntry]] = {name: [] for name in names}
    for path in paths:
        for frame in (piece for piece in read_segment(path) if isinstance(piece, Frame)):
            if (name := by_key.get(key_of(frame.payload))) is not None:
                found[name].append((frame.schema, frame.kind, bytes(frame.payload)))
    return found


def pack_entries(episode_id: str, entries: Iterable[EpisodeEntry]) -> tuple[PackedEntry, ...]:
    """Entries of an episode as the journal holds them."""
    return tuple(pack(episode_id, entry) for entry in entries)


def unpack_history(entries: Iterable[PackedEntry]) -> EpisodeHistory | None:
    """What entries of one episode say; None without a lease. Raises StorageError."""
    return build_history([unpack(*entry) for entry in entries])
