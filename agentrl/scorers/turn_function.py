"""A Python function as a scorer of turns."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from agentrl import registry
from agentrl.protocols import Scorer
from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.types.errors import Boundary, ConfigError, EpisodeError, boundary
from agentrl.types.turn_score import ScoredTurn, TurnScore


class TurnFunctionConfig(TurnScorerConfig):
    """A Python function judges each turn, in a worker process.

    Whoever judges several turns at once better than one by one registers a kind of scorers instead.
    """

    kind: Literal["turn_function"]
    """A function of the recipe's choice."""
    function: str
    """``module:attribute``; takes a `ScoredTurn`, gives the value of the state that its reply leads to, as a number, or
    a `TurnScore`, and may be a coroutine."""


class TurnFunction(Scorer):
    """Calls a function with each turn of a batch: coroutines all at once, other functions one after the other."""

    def __init__(self, function: Callable[[ScoredTurn], object], target: str) -> None:
        self._function = function
        self._version = f"{target}:{_source_digest(target)}"

    async def score(self, turns: Sequence[ScoredTurn]) -> list[TurnScore]:
        """What the function says of each; a turn at which it raises, or says nothing, has the failure instead."""
        return await asyncio.gather(*(self._score(turn) for turn in turns))

    async def close(self) -> None:
        """Nothing is held."""

    async def _score(self, turn: ScoredTurn) -> TurnScore:
        try:
            with boundary(Boundary.SCORER, "function"):
                said: Any = self._function(turn)
                said = await said if isinstance(said, Awaitable) else said
            return self._read(turn, said)
        except EpisodeError as error:
            return TurnScore(turn.key, self._version, failure=error.failure)

    def _read(self, turn: ScoredTurn, said: Any) -> TurnScore:
        if isinstance(said, TurnScore):
            return said
        if isinstance(said, bool) or not isinstance(said, Real):
            raise EpisodeError(Boundary.SCORER, "value", f"the function gave {said!r}, not a number or a TurnScore")
        return TurnScore(turn.key, self._version, float(said))


def check_turn_function(config: TurnFunctionConfig) -> None:
    """Whether there is such a function. Imports its module, as workers will. Raises ConfigError."""
    _load(config)


async def build_turn_function(config: TurnFunctionConfig, setting: ScorerSetting) -> TurnFunction:
    """The function as a scorer. Raises ConfigError."""
    return TurnFunction(_load(config), config.function)


def _load(config: TurnFunctionConfig) -> Callable[[ScoredTurn], object]:
    try:
        function = registry.load_target(config.function)
    except ConfigError as error:
        raise ConfigError(f"scorer '{config.name}': {error}") from error
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"scorer '{config.name}': {config.function} is a {type(function).__name__}, not a function; name one that "
            "takes a ScoredTurn"
        )
    return function


def _source_digest(target: str) -> str:
    """Of the file that a function is named in: an edited one makes other scores."""
    spec = sys.modules[target.partition(":")[0]].__spec__
    file = spec.origin if spec is not None and spec.has_location else None
    content = Path(file).read_bytes() if file is not None else b""
    return hashlib.blake2b(content, digest_size=4).hexdigest()


definition = ScorerDefinition(
    "turn_function",
    "a Python function, called with each turn",
    TurnFunctionConfig,
    build_turn_function,
    check_turn_function,
    computes=True,
)
