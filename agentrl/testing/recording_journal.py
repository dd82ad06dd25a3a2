"""A journal that remembers, so that a test can ask what was on record when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.rollouts.episode_log import EpisodeLog, NoLog
from agentrl.types.environment import StepResult
from agentrl.types.episode import Agent, Effect, Episode, Node, Ticket, Turn
from agentrl.types.generation import FinishReason


@dataclass(slots=True)
class RecordingJournal:
    """Keeps what its logs heard in `events`; environments and engines of a test may append to the same list.

    Example: a turn with one call leaves ``["reply 0", "intent e/0.0", "result e/0.0"]``.
    """

    events: list[str] = field(default_factory=list)

    async def open(self, ticket: Ticket, agents: tuple[Agent, ...]) -> EpisodeLog:
        """A log that writes to `events`."""
        return _RecordingLog(self.events)


class _RecordingLog(NoLog):
    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def turned(self, turn: Turn, nodes: Sequence[Node], finish: FinishReason, request: str) -> Turn:
        """A reply."""
        self._events.append(f"reply {turn.index}")
        return turn

    async def intended(self, effects: Sequence[Effect]) -> None:
        """What is about to run."""
        self._events += [f"intent {effect.effect_id}" for effect in effects]

    async def resulted(
        self, effects: Sequence[Effect], result: StepResult, seconds: float, snapshot: bytes | None
    ) -> tuple[tuple[Effect, ...], float]:
        """What came back."""
        self._events += [f"result {effect.effect_id}" for effect in effects]
        return tuple(effects), seconds

    async def ended(self, episode: Episode) -> None:
        """The end needs no event: the episode itself is in the test's hands."""
