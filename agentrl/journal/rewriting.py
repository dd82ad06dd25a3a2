"""What is left of a damaged journal takes its place; the damaged segments are kept beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from agentrl.journal.claim import Claim
from agentrl.journal.compaction import write_compacted
from agentrl.journal.disk import DISK
from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.journal.entries import Ended, Entry, Leased, pack
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.reading import all_segments, is_compacted
from agentrl.journal.segments import SegmentFile, number_of, segment_path, writer_of
from agentrl.types.errors import Boundary, Failure, StorageError


def rewrite(
    claim: Claim, histories: Iterable[EpisodeHistory], entries: Iterable[Entry], ends: Sequence[SegmentEnd] = ()
) -> Path:
    """Let a compacted segment of histories and entries of the buffer take the place of all of a claimed journal.

    Each writer has an empty segment behind it, so that its numbers go on, behind those of `ends` too, which the newest
    checkpoint names: `verify_offsets` takes that for a later one. A crash in between leaves the salvaged journal, or
    one that is still refused as damaged.

    Returns:
        Where the damaged segments are now.

    Raises:
        StorageError: it cannot be written.
    """
    folder = claim.folder
    aside = folder.with_name(f"{folder.name}.damaged-{claim.token}")
    segments = all_segments(folder)
    known = [(writer_of(path), number_of(path)) for path in segments if not is_compacted(path)]
    replaced = dict(sorted([*known, *((end.writer, end.number) for end in ends)]))  # of each writer the highest
    packed = [pack(history.ticket.episode_id, entry) for history in histories for entry in history.entries]
    try:
        DISK.make_folder(aside)
        write_compacted(folder, claim.token, replaced, [*packed, *(pack(None, entry) for entry in entries)])
        DISK.sync_folder(folder)
        for writer, number in replaced.items():
            SegmentFile.create(segment_path(folder, writer, number + 1), number + 1).close()
        for path in segments:
            DISK.rename(path, aside / path.name)
        DISK.sync_folder(aside)
        DISK.sync_folder(folder)
    except OSError as error:
        raise StorageError(f"the salvaged journal cannot be written: {error}; free space, then try again") from error
    return aside


def give_up(history: EpisodeHistory) -> None:
    """End an episode that may lack entries as failed: what else it did is not known, so it is not resumed."""
    lost = Failure(Boundary.CONTRACT, "journal", "entries of the episode were lost with a damaged journal")
    if not history.is_whole:
        history.entries[:] = [Leased(history.ticket, history.agents, history.token)]
        history.turns, history.results, history.acted, history.parts = [], [], {}, []
    history.ended = Ended(history.token, None, lost, 0.0, history.open_replies())
    history.entries.append(history.ended)
    history.pending, history.is_whole = None, True
