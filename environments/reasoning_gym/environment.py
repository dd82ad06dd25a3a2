"""The reasoning_gym environment: one question, one reply, and the generator's own judge."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.randomness import OwnChance
from agentrl_environments.reasoning_gym.answers import may_judge
from agentrl_environments.reasoning_gym.tasks import PACKAGE, ReasoningGymOptions, dataset, unpack

# Generators that give no answer of their own: only their judge knows.
WITHOUT_ANSWER = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
_SEED = 0
# What judges raise of answers that they did not expect.
_ODD = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


class ReasoningGymEnvironment:
    """One question; the reward is what `score_answer` gives for the answer between the tags, or for the whole reply.

    An answer that a judge would evaluate as a program, or that it raises of, scores 0.0.

    Example: ``What is 4 + 3?`` and ``<answer>7</answer>`` score 1.0.
    """

    def __init__(self, options: ReasoningGymOptions, task: Task) -> None:
        self._options = options
        self._extract_answer = PACKAGE.load("reasoning_gym.utils", options).extract_answer
        self._name: str = task.payload["generator"]
        self._entry = unpack(task.payload["entry"])
        self._reply: str | None = None

    async def start(self) -> Opening:
        """Ask the question."""
        asked = "\n\n".join(part for part in (self._entry["question"], self._options.instructions) if part)
        return Opening((Message(Role.USER, asked),))

    async def step(self, action: Message) -> StepResult:
        """Take the answer; it ends the episode."""
        self._reply = action.content
        return StepResult(is_done=True)

    async def score(self) -> Score:
        """The judge's verdict; without a reply 0.0."""
        if self._reply is None:
            return Score(0.0, {"tagged": 0.0, "refused": 0.0})
        tagged: str | None = self._extract_answer(self._reply)
        answer = self._reply.strip() if tagged is None else tagged
        is_refused = not may_judge(self._name, answer)
        reward = 0.0 if is_refused else self._judged(answer)
        return Score(reward, {"tagged": float(tagged is not None), "refused": float(is_refused)})

    async def close(self) -> None:
        """Nothing is held."""

    def _judged(self, answer: str) -> Any:
        with OwnChance(_SEED):
            judge = _judge(self._options.model_dump_json(), self._name)
            try:
                return judge.score_answer(answer, self._entry)
            except _ODD:
                return 0.0


@lru_cache(maxsize=16)
def _judge(options: str, name: str) -> Any:
    """A data set whose judge is asked: any will do that has the same arguments."""
    return dataset(ReasoningGymOptions(**json.loads(options)), name, _SEED)


def can_answer(options: ReasoningGymOptions) -> bool:
    """Whether all generators give an answer of their own."""
    return not WITHOUT_ANSWER & set(options.generators)


def act_right(options: ReasoningGymOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """The generator's own answer."""
    return Message(Role.ASSISTANT, f"<answer>{unpack(task.payload['entry'])['answer']}</answer>")
