from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.episode import Episode, Node, SampledColumns
from agentrl.types.generation import KeptTokens
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan


def sampled(index: int, parent: int | None, turn: int, ids: list[int], logprobs: list[float], step: int = 0) -> Node:
    spans = (VersionSpan(PolicyVersion(0, step), 0, len(ids)),)
    sample = SampledColumns(np.asarray(logprobs, np.float32), spans, spans)
    return Node(index, parent, "agent", turn, np.asarray(ids, np.int32), sample)


def context(index: int, parent: int | None, turn: int, ids: list[int]) -> Node:
    return Node(index, parent, "agent", turn, np.asarray(ids, np.int32))


def episode_of(*nodes: Node) -> Episode:
    return dataclasses.replace(build_episode(build_ticket(), [(1, 0)]), nodes=nodes)


def test_a_linear_episode_is_one_trajectory_as_documented():
    episode = episode_of(
        context(0, None, 0, [5, 6]),
        sampled(1, 0, 0, [7, 8], [-0.1, -2.3], step=3),
        context(2, 1, 1, [9]),
        sampled(3, 2, 1, [10], [-0.7], step=4),
    )
    (trajectory,) = build_trajectories(episode)
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert trajectory.turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert trajectory.weights.tolist() == [0, 0, 1, 1, 0, 1]
    assert trajectory.logprobs.tolist() == pytest.approx([0, 0, -0.1, -2.3, 0, -0.7])
    assert trajectory.versions == (VersionSpan(PolicyVersion(0, 3), 2, 4), VersionSpan(PolicyVersion(0, 4), 5, 6))
    assert trajectory.sampled.tolist() == [False, False, True, True, False, True]
    assert trajectory.kept_tokens is None


def test_a_shared_reply_weighs_one_over_the_leaves_below_it():
    episode = episode_of(
        context(0, None, 0, [1]),
        sampled(1, 0, 0, [2, 3], [-1, -1]),  # three leaves below
        context(2, 1, 1, [4]),
        sampled(3, 2, 1, [5], [-1]),  # leaf
        sampled(4, 1, 1, [6], [-1]),  # two leaves below
        sampled(5, 4, 2, [7], [-1]),
        sampled(6, 4, 2, [8], [-1]),
    )
    first, second, third = build_trajectories(episode)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1])
    assert second.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert second.weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 2, 1])
    assert third.token_ids.tolist() == [1, 2, 3, 6, 8]
    assert third.weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 2, 1])


@st.composite
def trees(draw):
    count = draw(st.integers(1, 9))
    nodes = []
    for index in range(count):
        parent = None if index == 0 else draw(st.integers(0, index - 1))
        ids = list(range(index * 10, index * 10 + draw(st.integers(1, 3))))
        if draw(st.booleans()):
            nodes.append(sampled(index, parent, index, ids, [-0.25 * index] * len(ids)))
        else:
            nodes.append(context(index, parent, 0, ids))
    return episode_of(*nodes)


@given(trees())
def test_over_all_branches_every_sampled_token_counts_exactly_once(episode):
    counts: dict[int, float] = {}
    for trajectory in build_trajectories(episode):
        for token, weight in zip(trajectory.token_ids.tolist(), trajectory.weights.tolist(), strict=True):
            counts[token] = counts.get(token, 0.0) + weight
    for node in episode.nodes:
        expected = 0.0 if node.sample is None else 1.0
        assert [counts[token] for token in node.token_ids.tolist()] == pytest.approx([expected] * len(node.token_ids))


@given(trees())
def test_there_is_one_trajectory_for_each_leaf_and_it_starts_at_a_root(episode):
    leaves = [n for n in episode.nodes if not any(m.parent == n.index for m in episode.nodes)]
    trajectories = build_trajectories(episode)
    assert [t.token_ids[-1] for t in trajectories] == [leaf.token_ids[-1] for leaf in leaves]
    assert {int(t.token_ids[0]) for t in trajectories} == {0}


def test_kept_sets_of_a_branch_follow_its_sampled_tokens():
    first = sampled(1, 0, 0, [2, 3], [-1, -1])
    second = sampled(2, 1, 1, [4], [-1])
    first = dataclasses.replace(
        first, sample=dataclasses.replace(first.sample, kept_tokens=KeptTokens.from_lists([[2, 9], [3]]))
    )
    second = dataclasses.replace(
        second, sample=dataclasses.replace(second.sample, kept_tokens=KeptTokens.from_lists([[4, 5, 6]]))
    )
    (trajectory,) = build_trajectories(episode_of(context(0, None, 0, [1]), first, second))
    assert trajectory.kept_tokens.ids.tolist() == [2, 9, 3, 4, 5, 6]
    assert trajectory.kept_tokens.offsets.tolist() == [0, 2, 3, 6]


def test_an_episode_that_never_began_has_no_trajectory():
    assert build_trajectories(episode_of()) == ()


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8), st.integers(0, 8))
def test_kept_sets_put_together_are_the_sets_in_order(sets, cut):
    parts = [KeptTokens.from_lists(sets[:cut]), KeptTokens.from_lists(sets[cut:])]
    whole = KeptTokens.concatenate(parts)
    bounds = whole.offsets.tolist()
    assert [whole.ids[a:b].tolist() for a, b in itertools.pairwise(bounds)] == sets
    assert len(whole) == len(sets)
