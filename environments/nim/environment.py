"""The game of Nim: two agents take objects from piles in turn, and who takes the last one wins."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.nim.tasks import PILES, NimOptions

FIRST, SECOND = "first", "second"


class NimEnvironment:
    """One game. A move names a pile and how many objects are taken; anything else loses the game, and a reply that is
    cut by its length or a limit of turns ends it without a winner.

    Example: ``first`` reads ``a 3 b 5`` and says ``b 2``; ``second`` reads ``a 3 b 3`` and says ``a 3``; ``first``
    reads ``a 0 b 3``, says ``b 3`` and has won: 1.0, and 0.0 for ``second``.
    """

    def __init__(self, options: NimOptions, task: Task) -> None:
        self._piles = dict(zip(PILES, task.payload["piles"], strict=False))
        self._mover = FIRST
        self._winner: str | None = None
        self._num_moves = 0
        self._is_foul = False

    async def start(self) -> Opening:
        """Show the piles to the first agent."""
        return Opening((_shown(self._piles),), agent=FIRST)

    async def step(self, action: Message) -> StepResult:
        """Take an agent's move, and show the other one what is left."""
        other = SECOND if self._mover == FIRST else FIRST
        move = parse_move(action.content, self._piles)
        if move is None:
            self._winner, self._is_foul = other, True
            return StepResult(is_done=True)
        pile, taken = move
        self._piles[pile] -= taken
        self._num_moves += 1
        if not any(self._piles.values()):
            self._winner = self._mover
            return StepResult(is_done=True)
        self._mover = other
        return StepResult((_shown(self._piles),), agent=other)

    async def score(self) -> Score:
        """1.0 for who has won, else 0.0, also for both if the game was not over; the whole has the first agent's."""
        rewards = {agent: float(agent == self._winner) for agent in (FIRST, SECOND)}
        metrics = {"moves": float(self._num_moves), "fouls": float(self._is_foul)}
        return Score(rewards[FIRST], metrics, agent_rewards=rewards)

    async def close(self) -> None:
        """Nothing is held."""


def parse_move(text: str, piles: Mapping[str, int]) -> tuple[str, int] | None:
    """Pile and number of objects of a move that the piles allow. Example: ``b 2`` is ``("b", 2)``; else None."""
    pile, _, number = text.strip().partition(" ")
    if pile not in piles or not number.isascii() or not number.isdigit() or len(number) > 1:
        return None
    return (pile, int(number)) if 0 < int(number) <= piles[pile] else None


def _shown(piles: Mapping[str, int]) -> Message:
    return Message(Role.USER, " ".join(f"{pile} {number}" for pile, number in piles.items()))


def read_piles(message: Message) -> dict[str, int]:
    """The piles that a message shows. Example: ``a 3 b 5`` is ``{"a": 3, "b": 5}``."""
    words = message.content.split()
    return {pile: int(number) for pile, number in zip(words[::2], words[1::2], strict=True)}
