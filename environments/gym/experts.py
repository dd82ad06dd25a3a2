"""A player of Gymnasium's games that have a table of their transitions, or rules that are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.gym.games import NumberedGame
from agentrl_environments.gym.options import GymOptions
from agentrl_environments.gym.sources import open_game
from agentrl_environments.randomness import OwnChance

_DISCOUNT = 0.99
_SWEEPS = 300
_BLACKJACK = "Blackjack-v1"
_STICK_FROM = 17
Values = np.ndarray[Any, np.dtype[np.float64]]
Table = dict[int, dict[int, list[tuple[float, int, float, bool]]]]


def can_plan(options: GymOptions) -> bool:
    """Whether `act_planned` can play it."""
    if options.source != "gymnasium":
        return False
    if options.game == _BLACKJACK:
        return True
    game = open_game(options, 0)
    try:
        return isinstance(game, NumberedGame) and hasattr(game.environment.unwrapped, "P")
    finally:
        game.close()


def act_planned(options: GymOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """The best action in the state that the conversation has led to; of Blackjack what the dealer does.

    Raises:
        ConfigError: the game has no table to plan by.
    """
    if not can_plan(options):
        raise ConfigError(f"nobody plays {options.game} rightly: it has no table of its transitions")
    seed = task.payload["seed"]
    with OwnChance(seed):
        game = open_game(options, seed)
        assert isinstance(game, NumberedGame)
        game.reset(seed)
        for message in messages:
            if message.role is Role.ASSISTANT:
                game.move(message.content)
        state = game.environment.unwrapped
        game.close()
    if options.game == _BLACKJACK:
        best = 0 if state._get_obs()[0] >= _STICK_FROM else 1
    else:
        best = int(np.argmax(_worths(options.model_dump_json(), seed)[state.s]))
    return Message(Role.ASSISTANT, next(name for name, number in game.actions.items() if number == best))


@lru_cache(maxsize=64)
def _worths(options: str, seed: int) -> Values:
    """[states, actions] what an action is worth in a state, by value iteration (Sutton and Barto, section 4.4)."""
    game = open_game(GymOptions.model_validate_json(options), seed)
    assert isinstance(game, NumberedGame)
    table: Table = game.environment.unwrapped.P
    game.close()
    width = max(len(outcomes) for actions in table.values() for outcomes in actions.values())
    chance, follower, reward, goes_on = np.zeros((4, len(table), len(table[0]), width))
    for state, actions in table.items():
        for action, outcomes in actions.items():
            for place, (share, then, gained, is_over) in enumerate(outcomes):
                at = (state, action, place)
                chance[at], follower[at], reward[at], goes_on[at] = share, then, gained, not is_over
    worth: Values = np.zeros(chance.shape[:2])
    for _ in range(_SWEEPS):
        ahead = worth.max(axis=1)[follower.astype(int)]
        worth = (chance * (reward + _DISCOUNT * goes_on * ahead)).sum(axis=2)
    return worth
