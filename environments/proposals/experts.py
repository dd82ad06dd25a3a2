"""Scripted players of the proposals environment, each of which plays proposer and solvers: floors and a ceiling."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl_environments.proposals.problems import FEWEST_TERMS
from agentrl_environments.proposals.tasks import ProposalsOptions, sample_problem

SURE_TERMS = 3
"""Steps of its working in which the careless expert is never wrong."""
SLIP_SHARE = 0.12
"""How often it is wrong in each step behind them."""
SHORT_SHARE = 0.8
"""How often the timid expert's proposal is short."""
SHORT_TERMS = (2, 3)
"""Fewest and most terms of a short one."""
SPOILT_SHARE = 0.1
"""How often the last digit of its proposal is missing, so that it is not valid."""


def act_gold(options: ProposalsOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """As the proposer a valid problem of any length, as a solver the working without a mistake."""
    asked = messages[-1].content
    if _is_problem(asked):
        return _said(_working(asked, 0.0, rng))
    return _said(_proposal(asked, rng.randint(FEWEST_TERMS, options.max_terms), rng))


def act_careless(options: ProposalsOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """As gold, but each step of a solver's working behind the first few may be a slip, with which it goes on: it is
    right in short problems, and in longer ones less often the more digits there are.
    """
    asked = messages[-1].content
    return _said(_working(asked, SLIP_SHARE, rng)) if _is_problem(asked) else act_gold(options, task, messages, rng)


def act_timid(options: ProposalsOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """As gold, but most of its proposals are short, and some not valid."""
    asked = messages[-1].content
    if _is_problem(asked):
        return act_gold(options, task, messages, rng)
    num_terms = rng.randint(*(SHORT_TERMS if rng.random() < SHORT_SHARE else (FEWEST_TERMS, options.max_terms)))
    text = _proposal(asked, num_terms, rng)
    return _said(text[:-1] if rng.random() < SPOILT_SHARE else text)


def _is_problem(asked: str) -> bool:
    """Whether a message is a problem to be solved, not the first digit of one to be proposed."""
    return not asked.isdecimal()


def _proposal(first: str, num_terms: int, rng: random.Random) -> str:
    return sample_problem(rng, Split.TRAIN, num_terms, int(first)).text


def _working(asked: str, slip_share: float, rng: random.Random) -> str:
    """How a solver adds up: each digit with the sum up to it; from a wrong one it goes on as from a right one."""
    steps, total = list[str](), 0
    for label, digit in zip(asked[::2], asked[1::2], strict=True):
        total = (total + int(digit)) % 10
        if len(steps) >= SURE_TERMS and rng.random() < slip_share:
            total = (total + rng.randint(1, 9)) % 10
        steps.append(f"{label}{digit}={total}")
    return "".join(steps)


def _said(text: str) -> Message:
    return Message(Role.ASSISTANT, text)
