"""A worker's journal for tests of one worker at a time, which nobody assigns episodes to."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.journal.history import EpisodeHistory
from agentrl.journal.holder import pack_entries
from agentrl.journal.writer import JournalWriter
from agentrl.rollouts.durable import WorkerJournal, WorkerLog
from agentrl.types.episode import Agent, Ticket
from agentrl.types.rollout import Assignment


class SoleHolder(WorkerJournal):
    """Holds every episode that is opened under one token, and goes on from its history if there is one.

    Example: ``SoleHolder(writer, 2, {"train-000000-0": history})`` plays on what the holder of token 1 began.
    """

    def __init__(
        self, writer: JournalWriter, token: int = 1, histories: Mapping[str, EpisodeHistory] | None = None
    ) -> None:
        super().__init__(writer)
        self.token, self._histories = token, dict(histories or {})

    async def open(self, ticket: Ticket, agents: tuple[Agent, ...]) -> WorkerLog:
        """Lease an episode."""
        history = self._histories.pop(ticket.episode_id, None)
        entries = pack_entries(ticket.episode_id, history.entries if history is not None else ())
        self.assign(Assignment(ticket, self.token, entries))
        return await super().open(ticket, agents)
