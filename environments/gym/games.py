"""One game behind one interface: text in, text and a reward out."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.types.errors import Boundary, EpisodeError


@dataclass(frozen=True, slots=True)
class Move:
    """What became of one reply; `reward` is None for one that is no action, of which the game hears nothing.

    Example: ``Move("SF\\n@G", 0.0, is_over=False)``.
    """

    text: str
    reward: float | None
    is_over: bool
    is_cut: bool = False
    """The game ended by a limit of its own, not by its rules."""


class TextGame(Protocol):
    """A game that is played by text."""

    def reset(self, seed: int) -> str:
        """Begin; the first observation, behind the instructions if there are any."""

    def move(self, reply: str) -> Move:
        """Act. Raises EpisodeError if the game does not keep to Gymnasium's interface."""

    def close(self) -> None:
        """Let go of what is held."""


class StringGame:
    """A game whose actions and observations are text already: a reply is the action, as it is.

    With `with_suffix` what gem puts into ``info["suffix"]`` follows the observation.
    """

    def __init__(self, name: str, environment: Any, instructions: str | None, with_suffix: bool = False) -> None:
        self._name, self._environment = name, environment
        self._instructions, self._with_suffix = instructions, with_suffix

    def reset(self, seed: int) -> str:
        """The first observation, behind the instructions."""
        begun = self._environment.reset(seed=seed)
        if not isinstance(begun, tuple) or len(begun) != 2:
            raise breach(self._name, f"reset() gave {begun!r:.80}, not an observation and an info")
        return behind(self._instructions, self._told(*begun))

    def move(self, reply: str) -> Move:
        """The reply as an action."""
        text, reward, is_over, is_cut, info = checked_step(self._name, self._environment.step(reply))
        return Move(self._told(text, info), reward, is_over or is_cut, is_cut)

    def close(self) -> None:
        """Games without a `close` hold nothing."""
        if hasattr(self._environment, "close"):
            self._environment.close()

    def _told(self, text: object, info: object) -> str:
        if not isinstance(text, str):
            raise breach(self._name, f"its observation is {text!r:.80}, not text")
        suffix = info.get("suffix") if self._with_suffix and isinstance(info, dict) else None
        return f"{text}\n{suffix}" if suffix else text


class NumberedGame:
    """A game of Gymnasium whose actions are numbers: each has a name, by which a reply says it.

    The action is the name that the reply says last: ``I go right, since left is a hole`` goes left.
    """

    def __init__(self, name: str, environment: Any, instructions: str | None, actions: dict[str, int]) -> None:
        self.environment, self.actions = environment, actions
        self._name, self._instructions = name, instructions
        self._tell: Callable[[Any, Any], str] = str_of
        words = sorted(actions, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(re.escape(word.casefold()) for word in words)})(?!\w)")

    def telling(self, tell: Callable[[Any, Any], str]) -> NumberedGame:
        """The same game, which says its observations so."""
        self._tell = tell
        return self

    def reset(self, seed: int) -> str:
        """The first observation, behind the instructions."""
        observation, _ = self.environment.reset(seed=seed)
        return behind(self._instructions, self._tell(self.environment, observation))

    def move(self, reply: str) -> Move:
        """The action that the reply names last; without one, what there is to choose from."""
        named = self._pattern.findall(reply.casefold())
        if not named:
            return Move(f"That names no action. Actions are: {', '.join(self.actions)}.", None, is_over=False)
        numbers_by_word = {word.casefold(): number for word, number in self.actions.items()}
        taken = self.environment.step(numbers_by_word[named[-1]])
        observation, reward, is_over, is_cut, _ = checked_step(self._name, taken)
        return Move(self._tell(self.environment, observation), reward, is_over or is_cut, is_cut)

    def close(self) -> None:
        """As Gymnasium does."""
        self.environment.close()


def str_of(environment: Any, observation: Any) -> str:
    """What a game shows as text, without colours; else its observation as Python writes it."""
    if environment.render_mode == "ansi":
        return re.sub(r"\x1b\[[0-9;]*m", "", environment.render()).strip("\n")
    return str(observation)


def behind(instructions: str | None, text: str) -> str:
    """Text behind instructions, if there are any."""
    return f"{instructions}\n\n{text}" if instructions else text


def checked_step(name: str, taken: object) -> tuple[Any, float, bool, bool, Any]:
    """The five parts of a step: observation, reward, terminated, truncated, info. Raises EpisodeError by name."""
    if not isinstance(taken, tuple) or len(taken) != 5:
        raise breach(name, f"step() gave {taken!r:.80}, not observation, reward, terminated, truncated and info")
    observation, reward, is_over, is_cut, info = taken
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise EpisodeError(Boundary.ENVIRONMENT, "reward", f"{name} gave the reward {reward!r}, not a finite number")
    return observation, float(reward), bool(is_over), bool(is_cut), info


def breach(name: str, message: str) -> EpisodeError:
    """What is raised of a game that does not keep to the interface."""
    return EpisodeError(Boundary.ENVIRONMENT, "answer", f"{name}: {message}")
