"""Trajectories: the token view of an episode's branches, with the weights that make both views equal.

An episode is a graph; a trainer may read it node by node or branch by branch. Weights define the
branch view so that it gives the same loss: a sampled node counts once, so each of the k leaves below
it carries it with weight 1/k. Advantages are given per node (the mean over the leaves below), so every
copy of a token has the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.types.episode import Episode, Node
from agentrl.types.generation import KeptTokens
from agentrl.types.version import VersionSpan

NOT_SAMPLED = -1
NOT_ROUTED = -1


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One branch of an episode, root to leaf: L tokens, prompt and replies included.

    Example: prompt [5, 6], sampled [7, 8] in turn 0, tool reply [9], sampled [10] in turn 1::

        token_ids = [ 5,  6,    7,    8,  9,   10]
        turns     = [-1, -1,    0,    0, -1,    1]
        weights   = [ 0,  0,    1,    1,  0,    1]
        logprobs  = [ 0,  0, -.10, -2.3,  0, -.70]
        versions  = (span(v3, 2, 4), span(v4, 5, 6))
    """

    agent: str
    token_ids: np.ndarray  # [L] int32
    turns: np.ndarray  # [L] int16, turn of a sampled token, NOT_SAMPLED elsewhere
    weights: np.ndarray  # [L] float32, 1 / leaves below the token's node where sampled, 0 elsewhere
    logprobs: np.ndarray  # [L] float32, 0 where not sampled
    versions: tuple[VersionSpan, ...]  # positions in the trajectory; cover the sampled tokens only
    kept_tokens: KeptTokens | None  # one set per sampled token, in order
    routed_experts: np.ndarray | None = None  # [L, layers, top_k] int16, NOT_ROUTED where unknown
    kv_versions: tuple[VersionSpan, ...] = ()  # as versions: oldest weights whose KV the tokens attended to

    @property
    def sampled(self) -> np.ndarray:
        """[L] bool, True where the policy drew the token."""
        sampled: np.ndarray = self.turns != NOT_SAMPLED
        return sampled


def build_trajectories(episode: Episode) -> tuple[Trajectory, ...]:
    """The branches of an episode in the order of their leaves; an episode without nodes has none."""
    nodes = episode.nodes
    parents = {node.parent for node in nodes}
    paths = [_path(nodes, leaf) for leaf in nodes if leaf.index not in parents]
    leaves_below = np.zeros(len(nodes), np.int64)
    for path in paths:
        for node in path:
            leaves_below[node.index] += 1
    return tuple(_flatten(path, leaves_below) for path in paths)


def _path(nodes: Sequence[Node], leaf: Node) -> list[Node]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(nodes[path[-1].parent])
    return path[::-1]


def _flatten(path: list[Node], leaves_below: np.ndarray) -> Trajectory:
    starts = np.cumsum([0] + [len(node.token_ids) for node in path])
    num_tokens = int(starts[-1])
    turns = np.full(num_tokens, NOT_SAMPLED, np.int16)
    weights = np.zeros(num_tokens, np.float32)
    logprobs = np.zeros(num_tokens, np.float32)
    spans: list[VersionSpan] = []
    kv_spans: list[VersionSpan] = []
    kept: list[KeptTokens] = []
    for node, start, end in zip(path, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if node.sample is None:
            continue
        turns[start:end] = node.turn
        weights[start:end] = 1.0 / leaves_below[node.index]
        logprobs[start:end] = node.sample.logprobs
        spans += _shifted(node.sample.versions, start)
        kv_spans += _shifted(node.sample.kv_versions, start)
        if node.sample.kept_tokens is not None:
            kept.append(node.sample.kept_tokens)
    return Trajectory(
        agent=path[-1].agent,
        token_ids=np.concatenate([node.token_ids for node in path]),
        turns=turns,
        weights=weights,
        logprobs=logprobs,
        versions=tuple(spans),
        kept_tokens=KeptTokens.concatenate(kept) if kept else None,
        routed_experts=_routing(path, num_tokens),
        kv_versions=tuple(kv_spans),
    )


def _shifted(spans: Sequence[VersionSpan], by: int) -> list[VersionSpan]:
    return [VersionSpan(span.version, span.start + by, span.end + by) for span in spans]


def _routing(path: list[Node], num_tokens: int) -> np.ndarray | None:
    """The path's records side by side; the last token, never forwarded by the engine, has none."""
    records = [n.sample.routed_experts for n in path if n.sample and n.sample.routed_experts is not None]
    if not records:
        return None
    rows = np.full((num_tokens, *records[0].experts.shape[1:]), NOT_ROUTED, np.int16)
    for record in records:
        rows[record.start : record.end] = record.experts
    return rows
