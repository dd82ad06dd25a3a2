"""Draws the seeds that make tasks, and keeps those of the splits apart."""

from __future__ import annotations

import json
import random

from agentrl.types.errors import ConfigError
from agentrl.types.task import Split, Task
from agentrl_environments.gym.games import TextGame
from agentrl_environments.gym.options import GymOptions
from agentrl_environments.gym.sources import is_told_by_opening, open_game
from agentrl_environments.randomness import OwnChance
from agentrl_environments.splits import split_of

_MAX_DRAWS = 1000


def sample_task(options: GymOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed, and their seeds are even.

    Where all of a task is told by its opening (a map, a start), openings are divided between the splits as well.

    Raises:
        ConfigError: all openings belong to the other split.
    """
    own_seed = seed if split is Split.TRAIN else 0
    chance = random.Random(f"{split}-{own_seed}-{ordinal}")
    for _ in range(_MAX_DRAWS):
        drawn = 2 * chance.randrange(2**30) + (split is Split.TRAIN)
        if not is_told_by_opening(options) or split_of(opening(options, drawn)) is split:
            return Task("gym", split, ordinal, {"seed": drawn})
    raise ConfigError(
        f"{options.game} with {json.dumps(options.arguments)} begins alike in {_MAX_DRAWS} tasks, so that none can be "
        f"{split}; leave more of it to chance, such as FrozenLake's map"
    )


def opening(options: GymOptions, seed: int) -> str:
    """How the game of a seed begins."""
    chance = OwnChance(seed)
    with chance:
        game: TextGame = open_game(options, seed)
        try:
            return game.reset(seed)
        finally:
            game.close()


def check_game(options: GymOptions) -> None:
    """Make the game once, so that a run whose game is not there ends before it begins. Tasks are endless.

    Raises:
        ConfigError: as `open_game` does.
    """
    with OwnChance(0):
        open_game(options, 0).close()
