"""Gymnasium's toy games in words: what is played, what actions are called, how a state reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl_environments.gym.games import str_of

_LAKE = (
    "You stand on a frozen lake (@). S is the start, F is ice, H a hole, G the goal. Reach the goal, and do not fall "
    "into a hole. Answer with one word: left, down, right or up."
)
_CLIFF = (
    "You walk on a grid (x) to the goal (T). C is a cliff: who steps on it is put back to the start and loses 100; any "
    "other step costs 1. Answer with one word: up, right, down or left."
)
_TAXI = (
    "You drive a taxi on a grid of five rows and columns, counted from 0 at the upper left; | is a wall, and R, G, Y "
    "and B are stops. Fetch the passenger, and set them down at their destination, which gives 20. A step costs 1, a "
    "wrong pickup or dropoff 10. Answer with one word: south, north, east, west, pickup or dropoff."
)
_BLACKJACK = (
    "You play Blackjack: come closer to 21 than the dealer, and not over it. Answer with one word: stick or hit."
)
_STOPS = ("R", "G", "Y", "B")


@dataclass(frozen=True, slots=True)
class Toy:
    """One of Gymnasium's toy games; `is_told_by_opening` says that its task is all in its first observation.

    Example: ``TOYS["Taxi"].actions[4]`` is ``pickup``.
    """

    instructions: str
    actions: tuple[str, ...]
    tell: Callable[[Any, Any], str] = str_of
    is_told_by_opening: bool = False


def toy_of(game: str) -> Toy | None:
    """What is known of a game by its id, whatever its version."""
    return TOYS.get(game.rpartition("-v")[0])


def is_lake(game: str) -> bool:
    """Whether a game has a map that can be drawn."""
    return game.startswith("FrozenLake")


def _tell_lake(environment: Any, observation: Any) -> str:
    lake = environment.unwrapped
    rows = [[cell.decode() for cell in row] for row in lake.desc]
    rows[observation // lake.ncol][observation % lake.ncol] = "@"
    return "\n".join("".join(row) for row in rows)


def _tell_taxi(environment: Any, observation: Any) -> str:
    taxi = environment.unwrapped
    row, column, passenger, destination = taxi.decode(observation)
    rows = "\n".join("".join(cell.decode() for cell in line) for line in taxi.desc)
    where = "in the taxi" if passenger == len(_STOPS) else f"at {_STOPS[passenger]}"
    return f"{rows}\nTaxi: row {row}, column {column}. Passenger: {where}. Destination: {_STOPS[destination]}."


def _tell_cards(environment: Any, observation: Any) -> str:
    total, shown, has_ace = observation
    ace = ", with an ace that counts 11" if has_ace else ""
    return f"Your cards: {total}{ace}. The dealer shows: {'an ace' if shown == 1 else shown}."


TOYS = {
    "FrozenLake": Toy(_LAKE, ("left", "down", "right", "up"), _tell_lake, is_told_by_opening=True),
    "FrozenLake8x8": Toy(_LAKE, ("left", "down", "right", "up"), _tell_lake, is_told_by_opening=True),
    "CliffWalking": Toy(_CLIFF, ("up", "right", "down", "left")),
    "CliffWalkingSlippery": Toy(_CLIFF, ("up", "right", "down", "left")),
    "Taxi": Toy(_TAXI, ("south", "north", "east", "west", "pickup", "dropoff"), _tell_taxi, is_told_by_opening=True),
    "Blackjack": Toy(_BLACKJACK, ("stick", "hit"), _tell_cards),
}
