"""Builds an episode's record while it is played; what is in it can be closed at any moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from agentrl.telemetry.spans import NO_TRACE, EpisodeTrace
from agentrl.types.environment import ScoreRecord
from agentrl.types.episode import Agent, Effect, Episode, Node, SampledColumns, StopReason, Ticket, Turn
from agentrl.types.errors import Boundary, EpisodeError, Failure
from agentrl.types.generation import Generation
from agentrl.types.score import with_scores


class EpisodeRecord:
    """The growing graph of one episode.

    Nodes are checked as they are added, so a record never holds a node that breaks an alignment law. Replies in the
    making are kept beside them, each under a name, and come behind all others if the episode ends before they do. Its
    `trace` takes what the episode was doing, and when.
    """

    def __init__(self, ticket: Ticket, agents: tuple[Agent, ...], trace: EpisodeTrace = NO_TRACE) -> None:
        self.ticket = ticket
        self.agents = agents
        self.trace = trace
        self._nodes: list[Node] = []
        self._ends: list[int] = []
        self._routed_ends: list[int] = []
        self._turns: list[Turn] = []
        self._committed: dict[str, int] = {}
        self._open: dict[str, _OpenReply] = {}
        self.stop_reason: StopReason | None = None
        self.failure: Failure | None = None
        self.scores: list[ScoreRecord] = []
        self.counts: Counter[str] = Counter()

    @property
    def num_turns(self) -> int:
        """Replies so far, of all agents."""
        return len(self._turns)

    @property
    def last_turn(self) -> Turn:
        """The turn that was closed last."""
        return self._turns[-1]

    def add_node(
        self, parent: int | None, agent: str, token_ids: np.ndarray, sample: SampledColumns | None = None
    ) -> Node:
        """Append a node.

        Raises:
            EpisodeError: the node breaks an alignment law (boundary contract).
        """
        node = Node(len(self._nodes), parent, agent, self.num_turns, token_ids, sample)
        known, end = self._check(node)
        self._nodes.append(node)
        self._ends.append(end)
        self._routed_ends.append(known if sample is None or sample.routed_experts is None else end - 1)
        return node

    def keep_open(self, name: str, agent: str, parent: int | None, prompt_ids: np.ndarray, part: Generation) -> None:
        """Keep a reply in the making, in the place of what was kept under its name.

        `prompt_ids` are what stands between the parent and the reply and is no node yet.

        Raises:
            EpisodeError: it breaks an alignment law (boundary contract).
        """
        reply = Node(len(self._nodes), parent, agent, self.num_turns, part.token_ids, SampledColumns.of(part), True)
        self._check(reply, len(prompt_ids))
        self._open[name] = _OpenReply(prompt_ids, reply)

    def forget_open(self, name: str) -> None:
        """A reply is in the making no more; one that never was is no error."""
        self._open.pop(name, None)

    def routed_end(self, leaf: int | None) -> int:
        """Where the record of routed experts ends on the path to a node: 0 without one."""
        return 0 if leaf is None else self._routed_ends[leaf]

    def add_turn(self, agent: str, reply: Node, generation_s: float, aborts: int, regenerated_tokens: int) -> Turn:
        """Close a reply as the next turn."""
        turn = Turn(self.num_turns, agent, reply.index, (), generation_s, 0.0, aborts, regenerated_tokens)
        self._turns.append(turn)
        return turn

    def end_turn(self, effects: tuple[Effect, ...], environment_s: float) -> None:
        """Put what the environment did behind the last turn."""
        self._turns[-1] = replace(self._turns[-1], effects=effects, environment_s=environment_s)

    def restore_turn(self, turn: Turn) -> None:
        """Put the last turn as an earlier worker recorded it in its place."""
        self._turns[-1] = turn

    def uncommitted(self, agent: str) -> tuple[Node, ...]:
        """An agent's nodes since the last call, which takes them as committed."""
        start = self._committed.get(agent, 0)
        self._committed[agent] = len(self._nodes)
        return tuple(node for node in self._nodes[start:] if node.agent == agent)

    @property
    def seconds(self) -> float:
        """Seconds of generation and environment so far, as recorded."""
        return sum(turn.generation_s + turn.environment_s for turn in self._turns)

    def close(self, seconds: float) -> Episode:
        """The episode as it stands."""
        played = Episode(
            ticket=self.ticket,
            agents=self.agents,
            nodes=tuple(self._nodes + self._open_nodes()),
            turns=tuple(self._turns),
            stop_reason=self.stop_reason if self.failure is None else None,
            failure=self.failure,
            seconds=seconds,
            counts=dict(self.counts),
        )
        return with_scores(played, self.scores)

    def _check(self, node: Node, prompt_tokens: int = 0) -> tuple[int, int]:
        """Where the routing that is known before a node ends, and where its context does.

        Raises:
            EpisodeError: the node breaks an alignment law (boundary contract).
        """
        start = 0 if node.parent is None else self._ends[node.parent]
        known, end = self.routed_end(node.parent), start + prompt_tokens + len(node.token_ids)
        if (breach := node.check() or node.check_routing(known, end)) is not None:
            raise EpisodeError(Boundary.CONTRACT, "node", f"{self.ticket.episode_id}: {breach}")
        return known, end

    def _open_nodes(self) -> list[Node]:
        nodes: list[Node] = []
        for kept in self._open.values():
            parent, agent = kept.reply.parent, kept.reply.agent
            if len(kept.prompt_ids):
                index = len(self._nodes) + len(nodes)
                nodes.append(Node(index, parent, agent, self.num_turns, kept.prompt_ids))
                parent = index
            nodes.append(replace(kept.reply, index=len(self._nodes) + len(nodes), parent=parent))
        return nodes


@dataclass(frozen=True, slots=True)
class _OpenReply:
    """A reply in the making, and what it stands behind if that is no node yet."""

    prompt_ids: np.ndarray
    reply: Node
