"""The journals of all rollout workers of a run: who holds which episode, and what of it is on record."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace

from agentrl.journal.claim import Claim
from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.journal.holder import newest_segment, read_held, unpack_history
from agentrl.rollouts.durable import WorkerJournal
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import Failure
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
