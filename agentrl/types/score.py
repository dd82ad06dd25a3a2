"""Scores of an episode: each scorer's is a record of its own, and together they make its rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Episode, Node
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore, token_digest


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards that some scores make together; `by_agent` is empty where agents are not judged apart."""

    reward: float | None
    by_agent: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def with_scores(episode: Episode, scores: Sequence[ScoreRecord]) -> Episode:
    """The episode with the rewards that these scores make; a failed scorer of any weight is the episode's failure.

    One that failed in play has no rewards, whatever was said of it.
    """
    if episode.failure is not None:
        return replace(episode, scores=tuple(scores))
    rewards = combined(scores, turn_agents(episode), [agent.name for agent in episode.agents])
    failure = next((s.failure for s in scores if s.failure is not None and s.weight), None)
    return replace(
        episode,
        scores=tuple(scores),
        reward=rewards.reward,
        agent_rewards=rewards.by_agent,
        metrics=rewards.metrics,
        failure=failure,
        stop_reason=episode.stop_reason if failure is None else None,
    )


def turn_agents(episode: Episode) -> dict[int, str]:
    """The agent of each turn, by the turn's index."""
    return {turn.index: turn.agent for turn in episode.turns}


def combined(scores: Iterable[ScoreRecord], turns: Mapping[int, str], agents: Sequence[str]) -> Rewards:
    """The weighted sum of some scores, for each agent.

    An agent's part of a score is its own reward there or else the episode's, and the rewards of its turns. A score
    without a reward makes none: it never counts as 0.

    Args:
        scores: of one episode, one of each scorer.
        turns: the agent of each turn, by its index.
        agents: names of all.
    """
    given = [record for record in scores if record.score is not None]
    metrics = _metrics(given)
    weighing = [(record.weight, record.score) for record in given if record.weight and record.score is not None]
    if not weighing or any(score.reward is None and not score.agent_rewards for _, score in weighing):
        return Rewards(None, metrics=metrics)
    names = agents or [""]
    totals = {agent: sum(weight * _part(score, agent, turns) for weight, score in weighing) for agent in names}
    if len(agents) < 2 or not any(score.agent_rewards or score.turn_rewards for _, score in weighing):
        return Rewards(totals[names[0]], metrics=metrics)
    return Rewards(sum(totals.values()) / len(totals), totals, metrics)


def _part(score: Score, agent: str, turns: Mapping[int, str]) -> float:
    own = score.agent_rewards.get(agent, score.reward)
    if own is None:
        own = sum(score.agent_rewards.values()) / len(score.agent_rewards)
    return own + sum(reward for turn, reward in score.turn_rewards.items() if turns.get(turn, agent) == agent)


def _metrics(scores: Sequence[ScoreRecord]) -> dict[str, float]:
    """Metrics of all scorers; of several under each one's name, with its reward."""
    found: dict[str, float] = {}
    for record in scores:
        assert record.score is not None
        prefix = f"{record.scorer}/" if len(scores) > 1 else ""
        found.update({f"{prefix}{name}": value for name, value in record.score.metrics.items()})
        if prefix and record.score.reward is not None:
            found[f"{prefix}reward"] = record.score.reward
    return found


def scored_turns(episode: Episode) -> Iterator[ScoredTurn]:
    """The turns of an episode for scorers, in their order; each costs its whole context in memory while it is used."""
    for turn in episode.turns:
        yield scored_turn(episode, turn.reply_node)


def scored_turn(episode: Episode, reply_node: int) -> ScoredTurn:
    """One turn of an episode for scorers, by the node of its reply."""
    node, path = episode.nodes[reply_node], path_ids(episode.nodes, reply_node)
    key = TurnKey(episode.episode_id, node.agent, node.turn, token_digest(path))
    ticket = episode.ticket
    start = len(path) - len(node.token_ids)
    return ScoredTurn(key, episode.policy_of(node.agent), path, start, ticket.environment, ticket.task.payload)


def own_turn_scores(
    episode: Episode, scores: Mapping[str, Mapping[TurnKey, TurnScore]]
) -> dict[str, tuple[TurnScore, ...]]:
    """Of what scorers said, by their names, all that is of the episode's own turns, in their order.

    A turn that was lost with its worker may have been judged before it was drawn anew, with other tokens.
    """
    if not scores:
        return {}
    keys = [turn.key for turn in scored_turns(episode)]
    return {name: tuple(given[key] for key in keys if key in given) for name, given in scores.items()}


def path_ids(nodes: Sequence[Node] | Mapping[int, Node], leaf: int) -> np.ndarray:
    """[L] int32: the tokens from the root to the end of a node, of nodes by their indices."""
    parts = []
    index: int | None = leaf
    while index is not None:
        parts.append(nodes[index].token_ids)
        index = nodes[index].parent
    return np.concatenate(parts[::-1]).astype(np.int32, copy=False)
