"""The record of one run: an episode is a graph of token runs, with the replay contract in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from agentrl.types.environment import ScoreRecord
from agentrl.types.errors import Failure
from agentrl.types.generation import Generation, KeptTokens, RoutedExperts
from agentrl.types.message import ToolCall
from agentrl.types.task import Task
from agentrl.types.turn_score import TurnScore
from agentrl.types.version import PolicyVersion, VersionSpan, spans_tile


class StopReason(StrEnum):
    """How an episode came to its end; each is an outcome, none an error."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, eq=False)
class SampledColumns:
    """The replay contract of n sampled tokens: what a trainer needs to recompute how they were drawn.

    `logprobs` are of the distribution the token was really drawn from (temperature and truncation
    applied, renormalised). `versions` and `kv_versions` tile ``[0, n)``; they differ only after an
    in-place swap. `kept_tokens` is None where nothing was truncated. `routed_experts` is None where the
    engine was not asked; else it covers the context from the end of the last reply's record to the position
    before this reply's last token, prompt and tool results in between included. A position's record is the
    first that was made: the one under which the token behind it was drawn.

    Example: prompt of 3, reply of 4, tool result of 2, reply of 2: the first reply's record covers positions
    0 to 5, the second's 6 to 9; position 10, the last, has none.
    """

    logprobs: np.ndarray  # [n] float32, nats
    versions: tuple[VersionSpan, ...]
    kv_versions: tuple[VersionSpan, ...]
    kept_tokens: KeptTokens | None = None
    routed_experts: RoutedExperts | None = None

    @classmethod
    def of(cls, generation: Generation) -> SampledColumns:
        """What an engine reported of the tokens that it delivered."""
        return cls(
            logprobs=generation.logprobs,
            versions=generation.versions,
            kv_versions=generation.kv_versions,
            kept_tokens=generation.kept_tokens,
            routed_experts=generation.routed_experts,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One append to one agent's context.

    `sample` is None for tokens that the policy did not draw (prompt, tool results, template); such
    tokens are never trained. `is_open` marks a reply whose generation has not ended.

    Example: a prompt node of 19 tokens (``parent None``), then a sampled node of 12 whose parent is 0.
    """

    index: int
    parent: int | None
    agent: str
    turn: int
    token_ids: np.ndarray  # [n] int32
    sample: SampledColumns | None = None
    is_open: bool = False

    def check(self) -> str | None:
        """The alignment law that this node breaks, in words, or None: columns match the ids and tile."""
        num_tokens = len(self.token_ids)
        if self.sample is None:
            return None
        if len(self.sample.logprobs) != num_tokens:
            return f"node {self.index}: {len(self.sample.logprobs)} logprobs for {num_tokens} tokens"
        if not np.isfinite(self.sample.logprobs).all() or (self.sample.logprobs > 1e-4).any():
            return f"node {self.index}: a logprob is not finite or above 0"
        for name, spans in (("versions", self.sample.versions), ("kv_versions", self.sample.kv_versions)):
            if not spans_tile(spans, num_tokens):
                return f"node {self.index}: {name} {spans} do not tile {num_tokens} tokens"
        if self.sample.kept_tokens is not None and len(self.sample.kept_tokens) != num_tokens:
            return f"node {self.index}: {len(self.sample.kept_tokens)} kept sets for {num_tokens} tokens"
        return None

    def check_routing(self, known: int, end: int) -> str | None:
        """The alignment law that the routing breaks, in words, or None: a path's records tile without gap.

        `known` is where the record of the path before this node ends, `end` the context's length with it.
        """
        if self.sample is None or self.sample.routed_experts is None:
            return None
        routed = self.sample.routed_experts
        if routed.experts.ndim != 3:
            return f"node {self.index}: routed experts of shape {routed.experts.shape}"
        if (routed.start, routed.end) != (known, end - 1):
            found = f"[{routed.start}, {routed.end})"
            return f"node {self.index}: experts of positions {found}, expected [{known}, {end - 1})"
        return None


@dataclass(frozen=True, slots=True)
class Effect:
    """One tool call as it was carried out: an intent with an id before it ran, a result after.

    `result` is None while the outcome is unknown.
    """

    effect_id: str
    call: ToolCall
    result: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and what the environment did with it; `regenerated_tokens` as in `Generation`."""

    index: int
    agent: str
    reply_node: int
    effects: tuple[Effect, ...] = ()
    generation_s: float = 0.0
    environment_s: float = 0.0
    aborts: int = 0
    regenerated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Agent:
    """A participant of an episode and the policy that it acts by."""

    name: str
    policy: str


@dataclass(frozen=True, slots=True)
class Fork:
    """The state that an episode goes on from: where another one, its parent, was behind a turn.

    All up to there is pinned: the parent's turns up to that one, and what the environment answered to it. `seed` is
    the parent's, from which the scaffold's chance comes, so that the scaffold does the same again.

    Example: ``Fork("train-000012-0", 2, seed)`` pins turns 0 to 2; its name is ``train-000012-0@2``.
    """

    parent: str
    turn: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the state; episodes that went on from it have it in common."""
        return f"{self.parent}@{self.turn}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to run one episode: what admission hands to a rollout worker.

    `group` numbers the group, `member` the episode in it, `attempt` counts re-dispatches after
    infrastructure failures. `seed` fixes every random draw of the episode. `environment` is the name by which the
    recipe knows what is played. `fork` is the state that it goes on from, None for one that is played from its start.
    """

    episode_id: str
    task: Task
    group: int
    member: int
    attempt: int
    seed: int
    started_at: dict[str, PolicyVersion] = field(default_factory=dict)  # loaded version by policy
    environment: str = ""
    fork: Fork | None = None

    @property
    def scaffold_seed(self) -> int:
        """What the scaffold's chance comes from."""
        return self.seed if self.fork is None else self.fork.seed

    def is_pinned(self, turn: int) -> bool:
        """Whether a turn is its parent's, and not its own."""
        return self.fork is not None and turn <= self.fork.turn

    def player_of(self, turn: int) -> str:
        """Name of the episode that a turn was played in; ids of the turn's tool calls begin with it."""
        return self.fork.parent if self.fork is not None and turn <= self.fork.turn else self.episode_id


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """The record of one run from its first prompt to its end.

    `reward` is None when the episode was not scored: it is never read as 0. Where agents are judged apart,
    `agent_rewards` has theirs and `reward` is their mean. `scores` are what these are made of. `failure` is separate
    from `stop_reason`: an episode that ran out of turns has no failure, one whose environment crashed has no stop
    reason. `counts` are of what its programs asked for, and of what they did not get. `turn_scores` has what scorers of
    turns said, by the scorer's name; one that is not complete there has no say in the credit of the episode.

    Example: a SQL episode of three turns has nodes prompt, reply, bridge, reply, bridge, reply; one
    leaf; ``stop_reason answered``; ``reward 1.0``.
    """

    ticket: Ticket
    agents: tuple[Agent, ...]
    nodes: tuple[Node, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    agent_rewards: dict[str, float] = field(default_factory=dict)
    scores: tuple[ScoreRecord, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    turn_scores: dict[str, tuple[TurnScore, ...]] = field(default_factory=dict)

    @property
    def episode_id(self) -> str:
        """Name of the episode, unique in a run."""
        return self.ticket.episode_id

    @property
    def outcome(self) -> str:
        """How it ended, in one word: its stop reason, or ``failed``; empty while it is played."""
        return "failed" if self.failure is not None else str(self.stop_reason or "")

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes, each counted once."""
        return count_tokens(self.nodes)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that a policy drew in this episode, each counted once; those pinned are its parent's."""
        return count_sampled_tokens(node for node in self.nodes if not self.ticket.is_pinned(node.turn))

    @property
    def num_pinned_tokens(self) -> int:
        """Tokens that a policy drew in the parent, each counted once; 0 for an episode that is no fork."""
        return count_sampled_tokens(node for node in self.nodes if self.ticket.is_pinned(node.turn))

    def policy_of(self, agent: str) -> str:
        """The policy that `agent` acts by."""
        return next(a.policy for a in self.agents if a.name == agent)

    def rewards_of(self, policy: str) -> dict[str, float]:
        """The reward of each agent that acts by a policy; empty for an episode without a reward.

        Example: a speaker got 1.0 and a listener 0.0, each by a policy of its name: ``rewards_of("speaker")`` is
        ``{"speaker": 1.0}``.
        """
        if self.reward is None:
            return {}
        names = [agent.name for agent in self.agents if agent.policy == policy]
        return {name: self.agent_rewards.get(name, self.reward) for name in names}


class TokenRun(Protocol):
    """A node, or what an archive shows of one."""

    @property
    def token_ids(self) -> Sized:
        """Its tokens."""

    @property
    def sample(self) -> object | None:
        """How a policy drew them; None if none did."""


def count_tokens(nodes: Iterable[TokenRun]) -> int:
    """Tokens of some nodes, each counted once."""
    return sum(len(node.token_ids) for node in nodes)


def count_sampled_tokens(nodes: Iterable[TokenRun]) -> int:
    """Tokens that a policy drew, each counted once."""
    return sum(len(node.token_ids) for node in nodes if node.sample is not None)
