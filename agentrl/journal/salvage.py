"""Which entries still count once acknowledged ones are lost: none that may lack the one before it.

An episode that goes on from a turn which is not there would be trained as something that never happened, so it is
cut where it may have a gap, and whoever takes it over plays on from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.journal.entries import EpisodeEntry, Leased


class Trust:
    """What each writer has lost so far, told of its entries in the order of its segments.

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


def without_gaps(entries: Sequence[EpisodeEntry]) -> list[EpisodeEntry]:
    """The entries of one episode before the first whose holder lacks its lease, or found more than is there."""
    kept: list[EpisodeEntry] = []
    num_valid = token = 0
    for entry in sorted(entries, key=lambda entry: entry.token):
        if isinstance(entry, Leased):
            if entry.taken_over > num_valid:
                break
            num_valid, token = entry.taken_over, entry.token
        if entry.token != token:
            break
        num_valid += 1
        kept.append(entry)
    return kept
