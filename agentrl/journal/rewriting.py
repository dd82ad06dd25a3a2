"""A salvaged journal takes the place of the damaged one, which is kept beside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentrl.journal.claim import Claim
from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.journal.entries import Ended, Entry, Leased, pack
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.reading import all_segments
from agentrl.journal.segments import SegmentFile, number_of, segment_path, sync_folder
from agentrl.types.errors import Boundary, Failure, StorageError

_MADE = "journal.salvaged"


def rewrite(
    claim: Claim,
    writer: str,
    lives: Iterable[EpisodeHistory],
    entries: Iterable[Entry],
    ends: Sequence[SegmentEnd] = (),
) -> Path:
    """Write histories and entries of the buffer to a journal of their own, and put it in the place of the claimed one.

    The numbers of its segments go on from those of the damaged one, so that an archive stays in order. So do
    those of `ends`, the segments that the newest checkpoint names: `verify_offsets` takes what is written here for
    later ones. A crash between the two renames is mended by `finish_rewriting`.

    Returns:
        Where the damaged journal is now.

    Raises:
        StorageError: it cannot be written; nothing has changed then.
    """
    folder = claim.folder
    made, aside = folder.with_name(_MADE), folder.with_name(f"{folder.name}.damaged-{claim.token}")
    taken = [number_of(path) for path in all_segments(folder)] + [end.number for end in ends]
    number = 1 + max(taken, default=0)
    try:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        segment = SegmentFile.create(segment_path(made, writer, number), number)
        for life in lives:
            segment.append([pack(life.ticket.episode_id, entry) for entry in life.entries])
        segment.append([pack(None, entry) for entry in entries])
        segment.sync()
        segment.close()
        for other in {end.writer for end in ends} - {writer}:
            SegmentFile.create(segment_path(made, other, number), number).close()
        for path in folder.glob("claim-*.json"):
            shutil.copy2(path, made / path.name)
        sync_folder(made)
        folder.rename(aside)
        made.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise StorageError(f"the salvaged journal cannot be written: {error}; free space, then try again") from error
    return aside


def finish_rewriting(folder: Path) -> None:
    """Put a salvaged journal in its place if a crash came between. Raises OSError."""
    made = folder.with_name(_MADE)
    if not folder.exists() and made.exists():
        made.rename(folder)
        sync_folder(folder.parent)


def give_up(life: EpisodeHistory) -> None:
    """End an episode that may lack entries as failed: what else it did is not known, so it is not resumed."""
    lost = Failure(Boundary.CONTRACT, "journal", "entries of the episode were lost with a damaged journal")
    if not life.is_whole:
        life.entries[:] = [Leased(life.ticket, life.agents, life.token)]
        life.turns, life.results, life.acted, life.parts = [], [], {}, []
    life.ended = Ended(life.token, None, lost, None, {}, 0.0)
    life.entries.append(life.ended)
    life.pending, life.is_whole = None, True
