"""Draws questions of reasoning-gym's generators, and keeps those of the splits apart by their text."""

from __future__ import annotations

import ast
import json
import random
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.errors import ConfigError
from agentrl.types.task import Split, Task
from agentrl_environments.packages import Package, PackagedOptions
from agentrl_environments.randomness import OwnChance
from agentrl_environments.splits import split_of

PACKAGE = Package("reasoning-gym", "==0.1.25")
_SIZE = 64
_MAX_DRAWS = 8
_OF_DATASETS = "composite"


class Generator(ConfigModel):
    """One generator of a mix."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often it comes, beside the others' weights."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Its own configuration, by name, such as ``{ min_digits = 2 }``."""


class ReasoningGymOptions(PackagedOptions):
    """Which questions are asked."""

    generators: Annotated[dict[str, Generator], Field(min_length=1)] = Field(
        default_factory=lambda: {"chain_sum": Generator()}
    )
    """Generators by reasoning-gym's names, such as ``{ chain_sum = {}, countdown = { weight = 2 } }``."""
    instructions: str = "Give your answer, and nothing else, between <answer> and </answer>."
    """What stands behind each question. A reply without these tags is an answer as a whole."""


def check_generators(options: ReasoningGymOptions) -> None:
    """Make each once, so that a run whose generator is not there ends before it begins. Tasks are endless.

    Raises:
        ConfigError: there is no such generator, or it does not take its arguments.
    """
    for name in options.generators:
        dataset(options, name, 0)


def sample_task(options: ReasoningGymOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed, and no question is of both splits.

    The question and its answer are in the payload: isomorphic_strings, polynomial_multiplication, ransom_note and
    word_ladder draw by Python's hash of strings too, and ask otherwise in another process unless PYTHONHASHSEED is set.

    Raises:
        ConfigError: the generator has too few questions for two splits.
    """
    own_seed = seed if split is Split.TRAIN else 0
    chance = random.Random(f"{split}-{own_seed}-{ordinal}")
    weights = [generator.weight for generator in options.generators.values()]
    (name,) = chance.choices(list(options.generators), weights)
    for _ in range(_MAX_DRAWS):
        drawn = chance.randrange(2**31)
        with OwnChance(drawn):
            questions = dataset(options, name, drawn)
            entry = next(
                (e for e in map(questions.__getitem__, range(_SIZE)) if split_of(e["question"]) is split), None
            )
        if entry is not None:
            return Task("reasoning_gym", split, ordinal, {"generator": name, "entry": pack(entry)})
    raise ConfigError(
        f"{name} with {json.dumps(options.generators[name].arguments)} has no question for {split} among "
        f"{_MAX_DRAWS * _SIZE}; give it arguments that make more of them"
    )


def dataset(options: ReasoningGymOptions, name: str, seed: int) -> Any:
    """reasoning-gym's data set of a generator. Raises ConfigError if there is none, or its arguments are wrong."""
    PACKAGE.load("reasoning_gym", options)
    factory = PACKAGE.load("reasoning_gym.factory", options)
    known = sorted(set(factory.DATASETS) - {_OF_DATASETS})
    if name not in known:
        raise ConfigError(f"reasoning-gym has no generator '{name}'; it has {', '.join(known)}")
    try:
        return factory.create_dataset(name, seed=seed, size=_SIZE, **options.generators[name].arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"the arguments of {name} are wrong: {error}") from error


def pack(entry: dict[str, Any]) -> str | dict[str, Any]:
    """A question, its answer and what the judge needs, as plain JSON: Python literals as text, to keep tuples.

    Where there is more than literals, as JSON has it.
    """
    text = repr(entry)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        packed: dict[str, Any] = json.loads(json.dumps(entry, default=str))
        return packed
    return text


@lru_cache(maxsize=64)
def _unpacked(text: str) -> dict[str, Any]:
    entry: dict[str, Any] = ast.literal_eval(text)
    return entry


def unpack(packed: str | dict[str, Any]) -> dict[str, Any]:
    """What `pack` was given."""
    return _unpacked(packed) if isinstance(packed, str) else packed
