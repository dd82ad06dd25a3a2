"""The journals of all rollout workers of a run: who holds which episode, and what of it is on record."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace

from agentrl.journal.claim import Claim
from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.journal.forking import pinned_entries
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.holder import newest_segment, pack_entries, read_held, read_histories, unpack_history
from agentrl.rollouts.durable import WorkerJournal
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import Failure, StorageError
from agentrl.types.rollout import Assignment, PackedEntry

_TOKENS_OF_A_START = 32  # bits: no run hands episodes over four billion times between two starts


class WorkerJournals:
    """Gives out fencing tokens, reads what workers that are gone have left, and ends what no worker can.

    Tokens rise with every hand-over: one counter for all episodes of a start, which begins above all those of earlier
    starts. Without a claim nothing is on record, and an episode that is handed over begins anew.
    """

    def __init__(self, claim: Claim | None = None, own: WorkerJournal | None = None) -> None:
        """`own` is the journal of the run's process."""
        self.claim, self.own = claim, own
        self._tokens = itertools.count(claim.token << _TOKENS_OF_A_START if claim is not None else 1)
        self._begun: dict[str, int] = {}
        self._last_parent: EpisodeHistory | None = None
        self._reading = asyncio.Lock()
        self.ends: dict[str, SegmentEnd] = {}

    def next_token(self) -> int:
        """A token above all before it."""
        return next(self._tokens)

    def begin(self, worker: str) -> None:
        """A worker's process is about to start: what its name has on record by now is of others."""
        if self.claim is not None:
            self._begun[worker] = newest_segment(self.claim.folder, worker)

    def note_end(self, end: SegmentEnd | None) -> None:
        """How far a worker's journal is durable, as it says itself."""
        if end is not None:
            self.ends[end.writer] = end

    async def held(self, worker: str, tokens: Mapping[str, int]) -> dict[str, list[PackedEntry]]:
        """What a worker whose process is gone has put on record of episodes, by their names and its tokens.

        Waits for: the disk, in a thread.

        Raises:
            StorageError: it cannot be read.
        """
        if self.claim is None:
            return {}
        return await asyncio.to_thread(read_held, self.claim.folder, worker, self._begun[worker], tokens)

    async def lease(self, ticket: Ticket) -> None:
        """Put an episode on record that no worker has come to begin. Raises StorageError."""
        if self.own is not None:
            self.own.assign(Assignment(ticket, self.next_token(), ()))
            await self.own.open(ticket, ())

    async def pin(self, ticket: Ticket) -> tuple[PackedEntry, ...]:
        """Put on record of a fork what it has from its parent; returns that, once it is durable.

        Waits for: the disk.

        Raises:
            StorageError: the journal cannot be read or written, or lacks the parent.
        """
        if ticket.fork is None or self.own is None or self.claim is None:
            raise StorageError(f"{ticket.episode_id} is no fork, or no journal is kept that could have its parent")
        parent = await self._parent(ticket.fork.parent)
        entries = pack_entries(ticket.episode_id, pinned_entries(parent, ticket, self.next_token()))
        for entry in entries:
            self.own.writer.note(*entry)
        await self.own.writer.flush()
        return entries

    async def _parent(self, name: str) -> EpisodeHistory:
        """What is on record of an episode that has ended; read once for its forks, which come one behind the other."""
        async with self._reading:
            if self._last_parent is None or self._last_parent.ticket.episode_id != name:
                assert self.claim is not None
                found = await asyncio.to_thread(read_histories, self.claim.folder, [name])
                if name not in found:
                    raise StorageError(f"the journal lacks {name}, from which forks are to go on; resume the run")
                self._last_parent = found[name]
            return self._last_parent

    async def give_up(self, assignment: Assignment, failure: Failure) -> Episode:
        """End an episode as failed, with what is on record of it; returns once that is durable. Raises StorageError."""
        history = unpack_history(assignment.entries)
        episode = Episode(assignment.ticket, (), (), ()) if history is None else history.episode()
        episode = replace(episode, failure=failure)
        if self.own is not None:
            self.own.assign(assignment)
            log = await self.own.open(assignment.ticket, episode.agents)
            await log.ended(episode)
        return episode
