"""Draws what an episode begins with: the first digit of the proposal, and a problem that does not depend on one."""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.task import Split, Task
from agentrl_environments.proposals.problems import DIGITS, LABELS, Problem

_FEWEST_GIVEN = 5  # below, some lengths have hardly a held-out problem


class ProposalsOptions(ConfigModel):
    """How hard problems can become."""

    max_terms: Annotated[int, Field(ge=_FEWEST_GIVEN, le=len(LABELS))] = 20
    """Digits that a problem may have; it has 2 at least. Raise it where the solver no longer errs in the longest, with
    max_reply_tokens (4 a digit), max_context_tokens and the models' context_tokens (6 a digit, and the chat's own)."""


def sample_task(options: ProposalsOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    rng = random.Random(f"{split}-{own_seed}-{ordinal}")
    given = sample_problem(rng, split, rng.randint(_FEWEST_GIVEN, options.max_terms))
    return Task("proposals", split, ordinal, {"first": rng.choice(DIGITS), "given": given.text})


def sample_problem(rng: random.Random, split: Split, num_terms: int, first: int | None = None) -> Problem:
    """A problem of a split with so many digits, which may have to begin with a certain one."""
    while True:
        terms = [rng.choice(DIGITS) for _ in range(num_terms)]
        problem = Problem((terms[0] if first is None else first, *terms[1:]))
        if problem.split is split:
            return problem
