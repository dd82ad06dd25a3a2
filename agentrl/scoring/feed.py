"""Makes of turns as they are played what scorers see of them."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.types.episode import Node, Ticket
from agentrl.types.rollout import TurnPlayed
from agentrl.types.score import path_ids
from agentrl.types.turn_score import ScoredTurn, TurnKey, token_digest


class TurnFeed:
    """Keeps the tokens of episodes in play, and gives each new turn as scorers see it.

    `policy_of` tells an agent's policy, by environment and agent. An episode that goes on from what an earlier worker
    put on record has turns that are not known here: those behind them are left to the end of its play.
    """

    def __init__(self, policy_of: Callable[[str, str], str]) -> None:
        self._policy_of = policy_of
        self._nodes: dict[str, dict[int, Node]] = {}

    def add(self, ticket: Ticket, event: TurnPlayed) -> ScoredTurn | None:
        """The turn; None where not all of its context is known."""
        nodes = self._nodes.setdefault(ticket.episode_id, {})
        nodes.update((node.index, node) for node in event.nodes)
        reply = event.nodes[-1] if event.nodes else None
        if reply is None or not _is_known(nodes, reply):
            return None
        ids = path_ids(nodes, reply.index)
        key = TurnKey(ticket.episode_id, reply.agent, reply.turn, token_digest(ids))
        start = len(ids) - len(reply.token_ids)
        policy = self._policy_of(ticket.environment, reply.agent)
        return ScoredTurn(key, policy, ids, start, ticket.environment, ticket.task.payload)

    def forget(self, episode_id: str) -> None:
        """The episode is played no more."""
        self._nodes.pop(episode_id, None)


def _is_known(nodes: dict[int, Node], node: Node) -> bool:
    while node.parent is not None:
        if node.parent not in nodes:
            return False
        node = nodes[node.parent]
    return True
