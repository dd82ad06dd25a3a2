"""The gym environment: hands replies to a game of Gymnasium's interface, and adds up what it gives for them."""

from __future__ import annotations

import math

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.gym.games import Move
from agentrl_environments.gym.options import GymOptions
from agentrl_environments.gym.sources import open_game
from agentrl_environments.randomness import OwnChance

_NO_TOOLS = "There are no tools here; write the action as text."


class GymEnvironment:
    """One game of one seed; the reward is the sum of its rewards.

    A reply that is no action is answered, and the game hears nothing of it. Whatever the game draws from the global
    random generators is drawn from the instance's own state of them.

    Example: FrozenLake's ``@F``, ``HG``: ``right`` and ``down`` have 1.0 together.
    """

    def __init__(self, options: GymOptions, task: Task) -> None:
        self._seed: int = task.payload["seed"]
        self._chance = OwnChance(self._seed)
        self._moves: list[Move] = []
        with self._chance:
            self._game = open_game(options, self._seed)

    async def start(self) -> Opening:
        """Begin the game."""
        with self._chance:
            return Opening((Message(Role.USER, self._game.reset(self._seed)),))

    async def step(self, action: Message) -> StepResult:
        """Take a reply to the game."""
        if action.tool_calls:
            return StepResult(tuple(Message(Role.TOOL, _NO_TOOLS, tool_call_id=c.id) for c in action.tool_calls))
        with self._chance:
            move = self._game.move(action.content)
        self._moves.append(move)
        return StepResult((Message(Role.USER, move.text),), is_done=move.is_over)

    async def score(self) -> Score:
        """The sum of the rewards; how many actions there were, and replies that were none."""
        rewards = [move.reward for move in self._moves if move.reward is not None]
        metrics = {
            "actions": float(len(rewards)),
            "unread_replies": float(len(self._moves) - len(rewards)),
            "cut": float(any(move.is_cut for move in self._moves)),
        }
        return Score(math.fsum(rewards), metrics)

    async def close(self) -> None:
        """End the game."""
        with self._chance:
            self._game.close()
