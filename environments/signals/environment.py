"""The signals environment: shows the object to the speaker, carries its word to the listener, compares."""

from __future__ import annotations

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.signals.tasks import SignalsOptions

SPEAKER, LISTENER = "speaker", "listener"


class SignalsEnvironment:
    """One game of two turns; whatever the speaker says is its message.

    Example: the speaker is shown ``crow`` and says ``ba``; the listener reads ``ba: drum crow egg`` and says ``crow``:
    both have 1.0.
    """

    def __init__(self, options: SignalsOptions, task: Task) -> None:
        self._word_cost = options.word_cost
        self._target: str = task.payload["target"]
        self._candidates: list[str] = task.payload["candidates"]
        self._said: str | None = None
        self._named: str | None = None

    async def start(self) -> Opening:
        """Show the object to the speaker."""
        return Opening((Message(Role.USER, self._target),), agent=SPEAKER)

    async def step(self, action: Message) -> StepResult:
        """Take the speaker's message to the listener; the listener's answer ends the game."""
        if self._said is None:
            self._said = action.content.strip()
            return StepResult((heard(self._said, self._candidates),), agent=LISTENER)
        self._named = action.content.strip()
        return StepResult(is_done=True)

    async def score(self) -> Score:
        """1.0 for both if the object is found, less the cost of the speaker's words for the speaker."""
        found = float(self._named == self._target)
        num_words = len((self._said or "").split())
        metrics = {"words": float(num_words)}
        if not self._word_cost:
            return Score(found, metrics)
        cost = self._word_cost * max(num_words - 1, 0)
        return Score(found, metrics, agent_rewards={SPEAKER: found - cost, LISTENER: found})

    async def close(self) -> None:
        """Nothing is held."""


def heard(said: str, candidates: list[str]) -> Message:
    """What the listener reads."""
    return Message(Role.USER, f"{said}: {' '.join(candidates)}")
