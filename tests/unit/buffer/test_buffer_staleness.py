from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.staleness import count_trained, oldest_staleness, train_view, wait_permits, without_fresh_tokens
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.batch import TrainBatch, TrainEpisode
from agentrl.types.episode import Node, SampledColumns
from agentrl.types.version import PolicyVersion, VersionSpan

V5 = PolicyVersion(0, 5)


def test_tokens_of_a_span_older_than_the_bound_are_masked_and_the_rest_trains():
    episode = build_episode(build_ticket(), [(2, 2), (3, 4)], prompt_tokens=1)
    [view] = train_view(episode, "main", V5, max_staleness=1)
    assert view.staleness.tolist() == [0, 3, 3, 0, 0, 1, 1, 1]
    assert view.loss_mask.tolist() == [False, False, False, False, False, True, True, True]
    assert oldest_staleness([view]) == 3


def test_without_a_bound_every_sampled_token_trains_and_says_its_age():
    episode = build_episode(build_ticket(), [(2, 0), (3, 4)], prompt_tokens=1)
    [view] = train_view(episode, "main", PolicyVersion(0, 1000), math.inf)
    assert view.loss_mask.tolist() == view.trajectory.sampled.tolist()
    assert view.staleness.tolist() == [0, 1000, 1000, 0, 0, 996, 996, 996]
    assert not view.fresh.any()


def test_tokens_of_lost_weights_ahead_of_these_train_only_without_a_bound():
    episode = build_episode(build_ticket(), [(2, 7)], prompt_tokens=1)
    later = PolicyVersion(1, 5)
    [bounded], [unbounded] = (train_view(episode, "main", later, bound) for bound in (1, math.inf))
    assert (bounded.loss_mask.tolist(), bounded.staleness.tolist()) == ([False] * 3, [0, 2, 2])
    assert (unbounded.loss_mask.tolist(), unbounded.staleness.tolist()) == ([False, True, True], [0, 1, 1])
    assert not unbounded.fresh.any()


def test_a_reply_that_two_versions_wrote_is_masked_up_to_the_swap():
    episode = build_episode(build_ticket(), [(4, 5)], prompt_tokens=1)
    spans = (VersionSpan(PolicyVersion(0, 2), 0, 3), VersionSpan(V5, 3, 4))
    sample = SampledColumns(episode.nodes[1].sample.logprobs, spans, spans)
    mixed = replace(episode, nodes=(episode.nodes[0], replace(episode.nodes[1], sample=sample)))
    assert [view.loss_mask.tolist() for view in train_view(mixed, "main", V5, 2)] == [
        [False, False, False, False, True]
    ]
    assert train_view(mixed, "main", V5, 3)[0].loss_mask.tolist() == [False, True, True, True, True]


def test_a_token_is_fresh_if_the_very_weights_of_the_batch_drew_it_and_wrote_the_cache_it_attended_to():
    episode = build_episode(build_ticket(), [(2, 5), (4, 5)], prompt_tokens=1)
    first, second = episode.nodes[1], episode.nodes[3]
    versions = (VersionSpan(PolicyVersion(0, 4), 0, 1), VersionSpan(V5, 1, 4))
    swapped_in_place = (VersionSpan(PolicyVersion(0, 4), 0, 2), VersionSpan(V5, 2, 4))
    sample = SampledColumns(second.sample.logprobs, versions, swapped_in_place)
    nodes = (episode.nodes[0], first, episode.nodes[2], replace(second, sample=sample))
    [view] = train_view(replace(episode, nodes=nodes), "main", V5, max_staleness=1)
    # Prompt, two fresh ones, two of context; of version 4, of 5 with a cache of 4, of 5 alone.
    assert view.fresh.tolist() == [False, True, True, False, False, False, False, True, True]
    assert view.staleness.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_weights_of_another_epoch_drew_no_fresh_token():
    episode = build_episode(build_ticket(), [(2, 5)], prompt_tokens=1)
    later = PolicyVersion(1, 5)
    [view] = train_view(episode, "main", later, max_staleness=1)
    assert (view.fresh.tolist(), view.staleness.tolist()) == ([False] * 3, [0] * 3)
    [same] = train_view(episode, "main", V5, max_staleness=1)
    batch = without_fresh_tokens(TrainBatch("main", later, (TrainEpisode("e", 0, 1.0, (same,)),)))
    assert not batch.episodes[0].trajectories[0].fresh.any()
    assert batch.episodes[0].trajectories[0].loss_mask.tolist() == [False, True, True]


def test_tokens_that_no_policy_drew_are_never_trained():
    episode = build_episode(build_ticket(), [(2, 5), (1, 5)], prompt_tokens=3)
    [view] = train_view(episode, "main", V5, 0)
    assert view.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]


def test_another_policys_episodes_have_no_view():
    assert train_view(build_episode(build_ticket(), [(2, 5)]), "other", V5, 0) == ()


def test_a_span_from_the_future_is_an_error():
    with pytest.raises(ValueError, match=r"version 0\.6 is newer than 0\.5"):
        train_view(build_episode(build_ticket(), [(2, 6)]), "main", V5, 0)


def test_a_shared_prefix_counts_once_among_the_trained_tokens():
    episode = build_episode(build_ticket(), [(3, 5), (2, 5)], prompt_tokens=2)
    fork = Node(4, 1, "agent", 2, np.asarray([1, 2], np.int32))
    spans = (VersionSpan(V5, 0, 4),)
    sample = SampledColumns(np.full(4, -1.0, np.float32), spans, spans)
    leaf = Node(5, 4, "agent", 2, np.asarray([3, 4, 5, 6], np.int32), sample)
    forked = replace(episode, nodes=(*episode.nodes, fork, leaf))
    views = train_view(forked, "main", V5, 0)
    assert [int(view.loss_mask.sum()) for view in views] == [5, 7]
    batch = TrainBatch("main", V5, (TrainEpisode(forked.episode_id, 0, 1.0, views),))
    assert count_trained([forked], [batch]) == {forked.episode_id: 3 + 2 + 4}


@pytest.mark.parametrize(
    ("outstanding", "version", "staleness", "batch", "expected"),
    [
        ({2: 1}, 3, 1, 4, False),  # 2 + 1 - 3 = 0 places are left to what started at 2
        ({3: 4}, 3, 1, 4, True),
        ({3: 5}, 3, 1, 4, False),
        ({2: 4, 3: 4}, 3, 2, 4, True),  # 4 of 4 places, then 8 of 8
        ({2: 3, 3: 6}, 3, 2, 4, False),  # the younger fill the places of the second step: 9 of 8
        ({}, 7, 0, 1, True),
        ({0: 100}, 7, math.inf, 1, True),
    ],
)
def test_a_take_is_legal_if_what_it_leaves_behind_still_fits(outstanding, version, staleness, batch, expected):
    assert wait_permits(outstanding, version, staleness, batch) is expected


@given(
    st.dictionaries(st.integers(0, 6), st.integers(0, 12), max_size=6),
    st.integers(0, 6),
    st.integers(0, 4),
    st.integers(1, 4),
)
def test_a_legal_take_leaves_room_for_every_start_version(outstanding, version, staleness, batch):
    legal = all(
        sum(count for start, count in outstanding.items() if start <= o) <= max(o + staleness - version, 0) * batch
        for o in range(0, 7)
        if any(count for start, count in outstanding.items() if start <= o)
    )
    assert wait_permits({o: n for o, n in outstanding.items() if n}, version, staleness, batch) is legal


@given(st.dictionaries(st.integers(0, 6), st.integers(1, 12), max_size=6), st.integers(0, 4), st.integers(1, 4))
def test_after_a_legal_take_the_oldest_first_order_trains_everything_in_time(outstanding, staleness, batch):
    version = max(outstanding, default=0)
    if not wait_permits(outstanding, version, staleness, batch):
        return
    queue = [start for start in sorted(outstanding) for _ in range(outstanding[start])]
    steps = [version + 1 + place // batch for place in range(len(queue))]
    assert all(step - start <= staleness for start, step in zip(queue, steps, strict=True))
