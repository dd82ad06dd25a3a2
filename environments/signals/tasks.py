"""Draws what a game is about: a few objects in some order, and which of them is meant."""

from __future__ import annotations

import random
from typing import Annotated

from pydantic import Field, model_validator

from agentrl.config.base import ConfigModel
from agentrl.types.task import Split, Task
from agentrl_environments.splits import split_of

OBJECTS = ("apple", "boat", "crow", "drum", "egg", "flag", "goat", "hat")
WORDS = ("ba", "di", "fo", "gu", "ke", "lo", "mi", "nu")


class SignalsOptions(ConfigModel):
    """How hard the game is."""

    num_objects: Annotated[int, Field(ge=2, le=len(OBJECTS))] = 6
    """Objects that there are: so many words have to be agreed on."""
    num_candidates: Annotated[int, Field(ge=2, le=len(OBJECTS))] = 3
    """Objects that the listener chooses from; one over this is chance."""
    word_cost: Annotated[float, Field(ge=0)] = 0.0
    """What each word behind the first takes from the speaker's reward; the listener's is as it was."""

    @model_validator(mode="after")
    def _has_candidates(self) -> SignalsOptions:
        if self.num_candidates > self.num_objects:
            raise ValueError(f"num_candidates {self.num_candidates} is more than num_objects {self.num_objects}")
        return self


def sample_task(options: SignalsOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    rng = random.Random(f"{split}-{own_seed}-{ordinal}")
    while True:
        candidates = rng.sample(OBJECTS[: options.num_objects], options.num_candidates)
        target = rng.choice(candidates)
        if split_of_game(target, candidates) is split:
            return Task("signals", split, ordinal, {"target": target, "candidates": candidates})


def split_of_game(target: str, candidates: list[str]) -> Split:
    """Where a game belongs: no training game has its target among the same objects in the same order."""
    return split_of(" ".join([target, *candidates]))
