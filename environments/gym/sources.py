"""Makes a game of Gymnasium, of gem or of a function of one's own. Raises ConfigError by name if there is none."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from agentrl.types.errors import ConfigError
from agentrl_environments.gym.games import NumberedGame, StringGame, TextGame, str_of
from agentrl_environments.gym.options import GymOptions
from agentrl_environments.gym.toys import is_lake, toy_of
from agentrl_environments.packages import Package

GYMNASIUM = Package("gymnasium", "==1.4.*")
# It pins versions of msgspec and reasoning-gym that its games do not need, and agentrl cannot have.
GEM = Package("gem-llm", "==0.1.0", "--no-deps")
GEM_NEEDS = Package("reasoning-gym", "==0.1.25")
_NUM_NAMES = 12
_SMALLEST_LAKE = 2
_JUDGED_BY_REASONING_GYM = "rg:"


def open_game(options: GymOptions, seed: int) -> TextGame:
    """The game that the options name, for the task of a seed; not begun yet.

    Raises:
        ConfigError: the package is missing, there is no such game, or it cannot be made with these arguments.
    """
    match options.source:
        case "gymnasium":
            return _open_gymnasium(options, seed)
        case "gem":
            return _open_gem(options)
        case "factory":
            made = _made(options.game, lambda: _factory(options.game)(**options.arguments))
            return StringGame(options.game, made, options.instructions)


def is_told_by_opening(options: GymOptions) -> bool:
    """Whether a task's first observation says all that differs between tasks, so that equal ones are the same task."""
    toy = toy_of(options.game) if options.source == "gymnasium" else None
    return toy is not None and toy.is_told_by_opening and (not is_lake(options.game) or draws_map(options))


def draws_map(options: GymOptions) -> bool:
    """Whether each task has a frozen lake of its own."""
    return is_lake(options.game) and not {"desc", "map_name"} & set(options.arguments)


def _open_gymnasium(options: GymOptions, seed: int) -> NumberedGame:
    gymnasium = GYMNASIUM.load("gymnasium", options)
    game = options.game
    if game not in gymnasium.registry:
        raise ConfigError(f"gymnasium has no game '{game}'{_near(game, gymnasium.registry)}")

    def make() -> Any:
        modes = _entry(gymnasium.registry[game]).metadata.get("render_modes", ())
        arguments = {"render_mode": "ansi"} if "ansi" in modes else {}
        return gymnasium.make(game, **arguments, **_with_map(options, seed))

    environment = _made(game, make, gymnasium.error.Error)
    if not isinstance(environment.action_space, gymnasium.spaces.Discrete):
        raise ConfigError(
            f"{game} is played by {environment.action_space}, not by one of a few actions. Write a function whose game "
            'takes text, and play it by source = "factory"'
        )
    toy, first = toy_of(game), int(environment.action_space.start)
    names = options.actions or (
        toy.actions if toy else tuple(str(first + n) for n in range(environment.action_space.n))
    )
    if len(set(names)) != environment.action_space.n:
        raise ConfigError(f"{game} has {environment.action_space.n} actions; name as many, each once, not {names}")
    actions = {name: first + place for place, name in enumerate(names)}
    instructions = options.instructions or (toy.instructions if toy else f"Actions are: {', '.join(names)}.")
    return NumberedGame(game, environment, instructions, actions).telling(toy.tell if toy else str_of)


def _with_map(options: GymOptions, seed: int) -> dict[str, Any]:
    """The arguments, a frozen lake of the task's own among them."""
    if not draws_map(options):
        return options.arguments
    lake = GYMNASIUM.load("gymnasium.envs.toy_text.frozen_lake", options)
    given = dict(options.arguments)
    size = given.pop("size", 8 if "8x8" in options.game else 4)
    if type(size) is not int or size < _SMALLEST_LAKE:  # a map of one field is drawn for ever
        raise ConfigError(f"the size of {options.game} is a number of fields, {_SMALLEST_LAKE} at least, not {size!r}")
    return {**given, "desc": lake.generate_random_map(size=size, seed=seed)}


def _entry(spec: Any) -> Any:
    """The class or function that makes a game of Gymnasium."""
    if not isinstance(spec.entry_point, str):
        return spec.entry_point
    return _attribute(spec.entry_point, spec.id)


def _open_gem(options: GymOptions) -> StringGame:
    GEM_NEEDS.load("reasoning_gym", options)
    gem = GEM.load("gem", options)
    known = GEM.load("gem.envs.registration", options).ENV_REGISTRY
    if options.game not in known:
        raise ConfigError(f"gem has no game '{options.game}'{_near(options.game, known)}")
    if options.game.startswith(_JUDGED_BY_REASONING_GYM):
        raise ConfigError(
            f"{options.game} would have its answers evaluated as Python; play it by the environment reasoning_gym"
        )
    made = _made(options.game, lambda: gem.make(options.game, **options.arguments))
    return StringGame(options.game, made, options.instructions, with_suffix=True)


def _made(game: str, make: Callable[[], Any], *refusals: type[Exception]) -> Any:
    """What `make` gives. Raises ConfigError if arguments are wrong, or the game lacks packages or files of its own."""
    lacking: tuple[type[Exception], ...] = (ImportError, LookupError, *refusals)
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{game} cannot be made with these arguments: {error}") from error
    except lacking as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{game} cannot be made: it lacks a package or a download of its own, or has no such argument: {said}"
        ) from error


def _factory(target: str) -> Any:
    if ":" not in target:
        raise ConfigError(f"'{target}' names no function; with source = \"factory\" write it as module:attribute")
    return _attribute(target, target)


def _attribute(target: str, game: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{game}: {target} cannot be imported: {error}") from error


def _near(name: str, known: Iterable[str]) -> str:
    """Names that there are, those like it first."""
    there = sorted(known)
    near = difflib.get_close_matches(name, there, _NUM_NAMES, cutoff=0.5)
    shown = near + [other for other in there if other not in near][: max(_NUM_NAMES - len(near), 0)]
    return f". It has {len(there)} games, such as {', '.join(shown)}"
