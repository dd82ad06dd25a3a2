"""The facts environment: reads out facts, asks one question a turn, and counts the right answers."""

from __future__ import annotations

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.facts.tasks import FactsOptions, build_problem

INSTRUCTION = "Answer with one word only."


class FactsEnvironment:
    """One problem: the reward is the share of questions that are answered with the one right word and nothing else.

    Example: ``84`` and then ``Beth has 31 coins.``, where ``Beth`` alone is right, score 0.5.
    """

    def __init__(self, options: FactsOptions, task: Task) -> None:
        self._problem = build_problem(options, task.payload["seed"], task.split)
        self._num_answers = 0
        self._num_right = 0

    async def start(self) -> Opening:
        """Tell the facts and pose the first question."""
        question = self._problem.questions[0].text
        return Opening((Message(Role.USER, f"{self._problem.facts} {INSTRUCTION} {question}"),))

    async def step(self, action: Message) -> StepResult:
        """Take an answer and pose the next question; the last ends the episode."""
        questions = self._problem.questions
        self._num_right += _normalise(action.content) == _normalise(questions[self._num_answers].answer)
        self._num_answers += 1
        if self._num_answers == len(questions):
            return StepResult(is_done=True)
        return StepResult((Message(Role.USER, questions[self._num_answers].text),))

    async def score(self) -> Score:
        """Right answers over all questions; those that were not reached count as wrong."""
        return Score(self._num_right / len(self._problem.questions), {"answers": float(self._num_answers)})

    async def close(self) -> None:
        """Nothing is held."""


def _normalise(text: str) -> str:
    return text.strip().rstrip(".").casefold()
