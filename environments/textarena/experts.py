"""Perfect play of the games of TextArena that a few lines play."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl_environments.nim.tasks import best_move
from agentrl_environments.textarena.games import TextArenaOptions, game_of

_BOUNDS = re.compile(r"between (\d+) and (\d+)")
_HINT = re.compile(r"target number is (higher|lower)")
_PILE = re.compile(r"pile (\d+): (\d+)")
_GUESS = re.compile(r"\[(\d+)\]")


def knows(options: TextArenaOptions) -> bool:
    """Whether the expert plays the games of these options."""
    return all(_player(game_of(options, split)) is not None for split in Split)


def act_gold(options: TextArenaOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """The best action, by what the player has read. Raises ConfigError for a game that it does not know."""
    game = task.payload["game"]
    act = _player(game)
    if act is None:
        raise ConfigError(f"textarena: the expert gold plays {', '.join(_PLAYERS)}, not {game}")
    return Message(Role.ASSISTANT, act(messages))


def _player(game: str) -> Callable[[Sequence[Message]], str] | None:
    return _PLAYERS.get(game.split("-")[0])


def _halve(messages: Sequence[Message]) -> str:
    """The middle of the numbers that are left."""
    found = _BOUNDS.search(messages[0].content)
    assert found is not None, "the rules name no bounds"
    low, high = int(found[1]), int(found[2])
    guess = 0
    for message in messages[1:]:
        if message.role is Role.ASSISTANT:
            guess = int(_GUESS.findall(message.content)[-1])
        elif hint := _HINT.search(message.content):
            low, high = (guess + 1, high) if hint[1] == "higher" else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def _leave_balance(messages: Sequence[Message]) -> str:
    """Leave piles whose exclusive or is zero, from where the other player cannot win; one object if there is no way."""
    shown = _PILE.findall(messages[-1].content)
    piles = {int(number): int(amount) for number, amount in shown}  # the last that is said of a pile holds
    return "[{} {}]".format(*best_move(piles))


_PLAYERS = {"GuessTheNumber": _halve, "Nim": _leave_balance}
