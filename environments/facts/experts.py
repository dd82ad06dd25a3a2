"""A scripted player of the facts environment: the ceiling."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.facts.tasks import FactsOptions, build_problem


def act_right(options: FactsOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """The right word."""
    problem = build_problem(options, task.payload["seed"], task.split)
    return Message(Role.ASSISTANT, problem.questions[sum(m.role is Role.ASSISTANT for m in messages)].answer)
