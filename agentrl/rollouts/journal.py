"""A turn journal for episodes that nobody resumes: evaluations and teachers' transcripts."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types.episode import Effect, Ticket, Turn


class NoJournal:
    """Keeps nothing: such an episode is simply played again."""

    async def commit_reply(self, ticket: Ticket, turn: Turn) -> None:
        """The record in memory is enough."""

    async def commit_intents(self, ticket: Ticket, effects: Sequence[Effect]) -> None:
        """The record in memory is enough."""

    async def commit_results(self, ticket: Ticket, effects: Sequence[Effect]) -> None:
        """The record in memory is enough."""
