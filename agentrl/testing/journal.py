"""A turn journal that remembers, so that a test can ask what was on record when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.types.episode import Effect, Ticket, Turn


@dataclass(slots=True)
class RecordingJournal:
    """Keeps what it heard in `events`; environments and engines of a test may append to the same list.

    Example: a turn with one call leaves ``["reply 0", "intent e/0.0", "result e/0.0"]``.
    """

    events: list[str] = field(default_factory=list)

    async def commit_reply(self, ticket: Ticket, turn: Turn) -> None:
        """A reply."""
        self.events.append(f"reply {turn.index}")

    async def commit_intents(self, ticket: Ticket, effects: Sequence[Effect]) -> None:
        """What is about to run."""
        self.events += [f"intent {effect.effect_id}" for effect in effects]

    async def commit_results(self, ticket: Ticket, effects: Sequence[Effect]) -> None:
        """What came back."""
        self.events += [f"result {effect.effect_id}" for effect in effects]
