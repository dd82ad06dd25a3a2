"""What a starting run needs of its journal, and single episodes of it by name: both through the index."""

from __future__ import annotations

from pathlib import Path

from agentrl.journal.index import JournalIndex, signed_key, with_index
from agentrl.journal.life import EpisodeLife, build_life
from agentrl.journal.reading import JournalState, all_segments


def open_journal(folder: Path, index: Path | None = None) -> JournalState:
    """What is not final: the lives that are neither trained nor dropped for good, and what no checkpoint covers.

    Equal to `read_journal` without what is final (`settling` has the rule), at a cost that does not grow with it.
    `index` is the file of the index, by default ``index.sqlite`` in the folder; if the folder is on shared storage,
    a local disk is the faster place.

    Raises:
        StorageError: a segment cannot be read or is of a newer program, or the index cannot be written.
    """
    return with_index(folder, index, _state) if all_segments(folder) else JournalState()


def read_life(folder: Path, episode_id: str, index: Path | None = None) -> EpisodeLife | None:
    """One episode, final or not; None if the segments do not hold it (any more: then the archive may).

    Raises:
        StorageError: as `open_journal`.
    """
    key = signed_key(episode_id)
    found = with_index(folder, index, lambda journal: journal.entries([key])) if all_segments(folder) else {}
    return build_life(found.get(key, []))


def _state(journal: JournalIndex) -> JournalState:
    state = JournalState(tears=journal.tears)
    for entries in journal.entries(journal.unfinished()).values():
        state.add_life(entries)
    for entry in journal.uncovered():
        state.note(entry)
    return state
