"""The TextArena environment: one game, played by one agent or by two in turn."""

from __future__ import annotations

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.textarena.games import AGENTS, Match, TextArenaOptions


class TextArenaEnvironment:
    """A game to its end. What an agent says is its action, whole; what it reads is what it has not read yet.

    Example: of ``Nim-v0`` the agent ``first`` reads the rules and three piles, says ``[0 3]``, and ``second`` reads
    the rules, the piles and what ``first`` did. Who takes the last object has 1.0, the other one -1.0.
    """

    def __init__(self, options: TextArenaOptions, task: Task) -> None:
        self._options, self._task = options, task
        self._match: Match | None = None

    async def start(self) -> Opening:
        """Deal, and tell the first player the rules."""
        payload = self._task.payload
        self._match = Match(self._options, payload["game"], payload["seed"], payload["players"])
        return Opening(self._heard(self._match), agent=self._agent(self._match))

    async def step(self, action: Message) -> StepResult:
        """Take a player's words to the game, and tell whoever is to move what has happened."""
        match = self._match
        assert match is not None, "the game has not begun"
        match.act(action.content)
        if match.is_over:
            return StepResult(is_done=True)
        return StepResult(self._heard(match), agent=self._agent(match))

    async def score(self) -> Score:
        """TextArena's rewards, of each player its own; the reward of the whole is the first player's."""
        players, match = self._task.payload["players"], self._match
        if match is None or not match.is_over:
            rewards = dict.fromkeys(range(players), self._options.unfinished_reward)
        else:
            rewards = match.rewards()
        if missing := [player for player in range(players) if rewards.get(player) is None]:
            game = self._task.payload["game"]
            raise EpisodeError(Boundary.ENVIRONMENT, "reward", f"{game} ended without a reward of players {missing}")
        metrics = {
            "finished": float(match is not None and match.is_over),
            "actions": 0.0 if match is None else float(match.num_actions),
        }
        if players == 1:
            return Score(rewards[0], metrics)
        return Score(rewards[0], metrics, agent_rewards={AGENTS[player]: rewards[player] for player in range(players)})

    async def close(self) -> None:
        """Nothing is held."""

    def _agent(self, match: Match) -> str | None:
        return None if self._task.payload["players"] == 1 else AGENTS[match.player]

    def _heard(self, match: Match) -> tuple[Message, ...]:
        return (Message(Role.USER, match.heard),)
