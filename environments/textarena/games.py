"""Games of TextArena: which of them can be played here, and one that is being played."""

from __future__ import annotations

import numbers
import random
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from agentrl.types.errors import Boundary, ConfigError, EpisodeError, boundary
from agentrl.types.task import Split, Task
from agentrl_environments.packages import Package, PackagedOptions
from agentrl_environments.randomness import OwnChance

PACKAGE = Package("textarena", "==0.7.4")
AGENTS = ("first", "second")
"""Agents by the number that TextArena gives the player; a game of one has no names."""
_GAME = -1  # the sender of what the game itself says


class TextArenaOptions(PackagedOptions):
    """Which game is played."""

    game: str = "GuessTheNumber-v0"
    """Id of the game, as TextArena registers it."""
    heldout_game: str | None = None
    """Id of the game of held-out tasks; without a value the same one under other seeds. Name a variant of another size
    where the game has no chance: under each seed it would begin alike."""
    unfinished_reward: float = 0.0
    """What each player gets for a game that was not over when its turns or tokens were. TextArena gives -1 for a
    defeat, 0 for a draw, 1 for a win: lower it if agents learn to play for time."""


class Match:
    """One game that is being played; what it draws depends on its seed alone.

    TextArena draws from the global generators of Python and NumPy, at the start and in the middle of games. They are
    this game's while it acts, and afterwards what they were, so games of one process do not disturb each other.

    Example: ``Match(options, "Nim-v0", 7, 2)`` has the player 0, who reads the rules and the piles; after
    ``act("[0 3]")`` the player is 1.
    """

    def __init__(self, options: TextArenaOptions, game: str, seed: int, players: int) -> None:
        self.is_over = False
        self.num_actions = 0
        self.player = 0
        self._players = players
        self._package = PACKAGE.load("textarena", options)
        self._chance = OwnChance(seed)
        with self._chance:
            self._game = self._package.make(game)
            self._game.reset(num_players=players, seed=seed)
            self._heard = self._read()

    @property
    def heard(self) -> str:
        """What the player whose turn it is has not read yet: a line for each message, its sender in front."""
        lines = [f"[{self._name(sender)}] {text}" for sender, text in self._heard]
        return "\n".join(lines) or "It is your turn."

    def act(self, text: str) -> None:
        """Carry out what the player says, which it then knows; its own words are not told to it again."""
        self.num_actions += 1
        with self._chance:
            self.is_over, _ = self._game.step(text)
            if not self.is_over:
                self._heard = self._read()

    def rewards(self) -> dict[int, Any]:
        """Of each player, once the game is over: a number as a float, all else as TextArena gave it."""
        rewards, _ = self._game.close()
        return {player: _plain(reward) for player, reward in (rewards or {}).items()}

    def _read(self) -> list[tuple[int, str]]:
        """What there is to read for whoever is to move, without what its wrappers repeat."""
        inner = self._game
        while isinstance(inner, self._package.Wrapper):
            inner = inner.env
        self.player, heard = inner.get_observation()
        return [
            (sender, text)
            for sender, text, kind in heard
            if not (kind is self._package.ObservationType.PLAYER_ACTION and self._is_own(sender))
        ]

    def _is_own(self, sender: int) -> bool:
        return sender == self.player or self._players == 1  # games of one have the game repeat what was said

    def _name(self, sender: int) -> str:
        if sender == _GAME:
            return "GAME"
        return str(self._game.state.role_mapping.get(sender, f"Player {sender}"))


def sample_task(options: TextArenaOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed, and have seeds of their own."""
    own_seed = seed if split is Split.TRAIN else 0
    drawn = random.Random(f"{split}-{own_seed}-{ordinal}").getrandbits(31)
    game = game_of(options, split)
    payload = {"game": game, "seed": 2 * drawn + (split is Split.HELDOUT), "players": num_players(options, game)}
    return Task("textarena", split, ordinal, payload)


def check_games(options: TextArenaOptions) -> None:
    """Whether the options' games can be played here; their tasks are endless. Raises ConfigError."""
    counts = {game_of(options, split): num_players(options, game_of(options, split)) for split in Split}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"textarena: games of different numbers of players: {counts}; choose another heldout_game")


def game_of(options: TextArenaOptions, split: Split) -> str:
    """Id of the game that a split's tasks are of."""
    return options.game if split is Split.TRAIN or options.heldout_game is None else options.heldout_game


@lru_cache(maxsize=64)
def num_players(options: TextArenaOptions, game: str) -> int:
    """Players of a game, one or two. Raises ConfigError if it is not there, needs more, or cannot be played here."""
    package = PACKAGE.load("textarena", options)
    known = package.envs.registration.ENV_REGISTRY
    if game not in known:
        there = ", ".join(_first_of_each(known))
        raise ConfigError(f"TextArena has no game '{game}'; it has {there} and their variants")
    failure: EpisodeError | None = None
    for players in (2, 1):  # games of one refuse two, and a game of two does not always refuse one
        try:
            with boundary(Boundary.ENVIRONMENT, "start"):
                Match(options, game, 0, players)
        except EpisodeError as error:
            failure = error
            continue
        return players
    assert failure is not None
    said = " ".join(str(failure.__cause__).strip("* \n").split())
    raise ConfigError(
        f"TextArena's game '{game}' cannot be played here by one or two: {type(failure.__cause__).__name__}: "
        f"{said[:160]}. Games may need words of NLTK, a key of OpenRouter and a network, Python 3.12, or more players: "
        "give it what it names, or choose another one"
    ) from failure


def _first_of_each(known: Iterable[str]) -> list[str]:
    """The first id of each game. Example: of ``Nim-v0``, ``Nim-v0-medium`` and ``Nim-v0-raw`` it is ``Nim-v0``."""
    return list({game.split("-v0")[0]: game for game in reversed(list(known))}.values())[::-1]


def _plain(reward: object) -> object:
    return reward if type(reward) is bool or not isinstance(reward, numbers.Real) else float(reward)
