"""Makes one problem of a seed: a few facts in plain words, and questions about them whose answer is one word."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.task import Split, Task

PEOPLE = {
    Split.TRAIN: tuple(
        "Adam Beth Carl Dora Emma Fred Grace Henry Irene James Kate Lucas Mary Nora Oscar Peter".split()
    ),
    Split.HELDOUT: tuple("Alice Brian Clara David Ellen Frank Helen Jacob Laura Mark Nancy Sarah".split()),
}
THINGS = {
    Split.TRAIN: tuple("apples books coins eggs keys pens stamps tickets shoes rings cups maps".split()),
    Split.HELDOUT: tuple("cards shells plants boxes bottles toys".split()),
}


class FactsOptions(ConfigModel):
    """How long a problem is."""

    num_people: Annotated[int, Field(ge=2, le=8)] = 4
    """People of whom the facts tell; more make the questions harder."""
    num_questions: Annotated[int, Field(ge=1, le=8)] = 2
    """Questions of an episode, one a turn."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and the one word that is right."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Who has how many of what, and questions about it.

    Example: facts ``Beth has 31 coins. Carl has 84 coins.``, questions ``How many coins does Carl have?`` and ``Who
    has 31 coins?``, answers ``84`` and ``Beth``.
    """

    facts: str
    questions: tuple[Question, ...]


def sample_task(options: FactsOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    return Task("facts", split, ordinal, {"seed": f"{split}-{own_seed}-{ordinal}"})


@lru_cache(maxsize=512)
def build_problem(options: FactsOptions, seed: str, split: Split) -> Problem:
    """The problem that a task's seed stands for; the splits share no person and no thing."""
    rng = random.Random(seed)
    people = rng.sample(PEOPLE[split], options.num_people)
    thing = rng.choice(THINGS[split])
    numbers = rng.sample(range(11, 99), options.num_people)
    facts = " ".join(f"{person} has {number} {thing}." for person, number in zip(people, numbers, strict=True))
    questions = []
    for _ in range(options.num_questions):
        index = rng.randrange(options.num_people)
        if rng.random() < 0.5:
            questions.append(Question(f"How many {thing} does {people[index]} have?", str(numbers[index])))
        else:
            questions.append(Question(f"Who has {numbers[index]} {thing}?", people[index]))
    return Problem(facts, tuple(questions))
