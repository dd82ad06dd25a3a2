"""What the adapter of TextArena does where the package is not."""

from __future__ import annotations

import random

import pytest

from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl_environments.textarena import definition
from agentrl_environments.textarena.experts import act_gold, knows
from agentrl_environments.textarena.games import TextArenaOptions, game_of

RULES = "You have to guess the number between 1 and 20 within 20 turns."


def said(game: str, *texts: str) -> str:
    """What the expert says after what it has read and said, in turn."""
    roles = (Role.USER, Role.ASSISTANT) * len(texts)
    messages = [Message(role, text) for role, text in zip(roles, texts, strict=False)]
    task = Task("textarena", Split.TRAIN, 0, {"game": game, "seed": 0, "players": 1})
    return act_gold(TextArenaOptions(game=game), task, messages, random.Random(0)).content


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match=r"textarena is not installed.*pip install 'textarena==0\.7\.4'"):
        definition.describe(TextArenaOptions())


def test_held_out_tasks_are_of_a_game_of_their_own_where_one_is_named():
    options = TextArenaOptions(game="Nim-v0", heldout_game="Nim-v0-large")
    assert [game_of(options, split) for split in (Split.TRAIN, Split.HELDOUT)] == ["Nim-v0", "Nim-v0-large"]
    assert game_of(TextArenaOptions(game="Nim-v0"), Split.HELDOUT) == "Nim-v0"


def test_the_expert_halves_what_is_left_of_the_numbers():
    game = "GuessTheNumber-v0"
    assert said(game, RULES) == "[10]"
    assert said(game, RULES, "[10]", "[GAME] The target number is higher.") == "[15]"
    hints = ("[10]", "[GAME] The target number is higher.", "[15]", "[GAME] The target number is lower.")
    assert said(game, RULES, *hints) == "[12]"


def test_the_expert_leaves_piles_whose_exclusive_or_is_zero():
    # 3 ^ 4 ^ 5 = 2 and 3 ^ 2 = 1, so the first pile must have one left; 1, 4 and 5 are in balance.
    assert said("Nim-v0", "Current Pile:\n  pile 0: 3\n  pile 1: 4\n  pile 2: 5") == "[0 2]"
    assert said("Nim-v0-large", "Current Pile:\n  pile 0: 1\n  pile 1: 4\n  pile 2: 5") == "[2 1]"


def test_the_expert_says_which_games_it_plays():
    assert knows(TextArenaOptions(game="Nim-v0"))
    assert not knows(TextArenaOptions(game="Nim-v0", heldout_game="TicTacToe-v0"))
    with pytest.raises(ConfigError, match="gold plays GuessTheNumber, Nim, not TicTacToe-v0"):
        said("TicTacToe-v0", "rules")
