"""What a fork has from its parent, as entries of its own: whoever plays it goes on from there as from a lost worker's.

They are copied, so that a fork's record is whole whatever becomes of the parent's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from agentrl.journal.entries import (
    NUMBERS,
    EpisodeEntry,
    Intended,
    Leased,
    StepResultRecorded,
    TurnCommitted,
)
from agentrl.journal.history import EpisodeHistory
from agentrl.types.episode import Ticket
from agentrl.types.errors import StorageError
from agentrl.types.rollout import PackedEntry

_LEASED = NUMBERS[Leased]


def pinned_entries(parent: EpisodeHistory, ticket: Ticket, token: int) -> list[EpisodeEntry]:
    """The parent's entries up to the state that the ticket's fork names, rewritten to the ticket, under a token.

    Tokens, columns, tool calls and their results stay as they are, the ids of the calls too. No live session is
    among them: two episodes cannot share one.

    Raises:
        StorageError: the parent's record does not reach that state.
    """
    fork = ticket.fork
    if fork is None or not parent.is_whole or parent.opened is None or fork.turn not in parent.acted:
        raise StorageError(f"what is on record of {parent.ticket.episode_id} does not reach the state {fork}")
    opened = replace(parent.opened, token=token, handle=None)
    lease = Leased(ticket, parent.agents, token)
    return [lease, opened, *(replace(entry, token=token) for entry in _played(parent.entries, fork.turn))]


def has_pinned(entries: Iterable[PackedEntry]) -> bool:
    """Whether entries of a fork hold all that it has from its parent.

    A kill may have come while that was written; it is whole once a second holder has taken it over.
    """
    return sum(kind == _LEASED for _, kind, _ in entries) > 1


def _played(entries: Iterable[EpisodeEntry], last: int) -> Iterator[TurnCommitted | Intended | StepResultRecorded]:
    """Turns up to the last that is wanted, and the environment's answers."""
    for entry in entries:
        if isinstance(entry, TurnCommitted):
            if entry.turn.index > last:
                return
            # What it cost to draw them counts for the parent.
            yield replace(entry, turn=replace(entry.turn, aborts=0, regenerated_tokens=0))
        elif isinstance(entry, Intended | StepResultRecorded):
            yield entry
