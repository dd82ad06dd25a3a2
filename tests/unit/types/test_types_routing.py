"""Routed experts as records: narrow, tiling, laid beside the tokens of a trajectory, through the codec."""

from __future__ import annotations

import re

import numpy as np
import pytest

from agentrl import codec
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.episode import Episode, Node, SampledColumns
from agentrl.types.generation import RoutedExperts
from agentrl.types.trajectory import Trajectory, build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan


def routed(start: int, end: int, dtype: type = np.uint8) -> RoutedExperts:
    """One layer of two experts: the position, and 100 more."""
    positions = np.arange(start, end)
    return RoutedExperts(start, np.stack([positions, positions + 100], 1)[:, None].astype(dtype))


def sampled(index: int, parent: int, count: int, record: RoutedExperts | None) -> Node:
    spans = (VersionSpan(PolicyVersion(0, 0), 0, count),)
    sample = SampledColumns(np.full(count, -0.5, np.float32), spans, spans, None, record)
    return Node(index, parent, "agent", 0, np.arange(count, dtype=np.int32), sample)


def context(index: int, parent: int | None, count: int) -> Node:
    return Node(index, parent, "agent", 0, np.arange(count, dtype=np.int32))


def episode_of(*nodes: Node) -> Episode:
    plain = build_episode(build_ticket(), [(1, 0)])
    return Episode(plain.ticket, plain.agents, nodes, ())


# Prompt 3, reply 4, tool result 2, reply 2.
LINE = (context(0, None, 3), sampled(1, 0, 4, routed(0, 6)), context(2, 1, 2), sampled(3, 2, 2, routed(6, 10)))


def test_ids_are_kept_in_the_narrowest_type():
    by_largest = {n: RoutedExperts.narrow(0, np.asarray([[[0, n]]], np.int32)) for n in (255, 256, 65535)}
    assert {n: kept.experts.dtype.name for n, kept in by_largest.items()} == {
        255: "uint8",
        256: "uint16",
        65535: "uint16",
    }
    assert all(kept.experts.max() == n for n, kept in by_largest.items())


def test_records_that_tile_become_one_and_others_are_refused():
    whole = RoutedExperts.concatenate([routed(2, 4), routed(4, 9, np.uint16)])
    assert (whole.start, whole.end, whole.experts[:, 0, 0].tolist()) == (2, 9, [2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(ValueError, match="from 5 on do not follow those up to 4"):
        RoutedExperts.concatenate([routed(2, 4), routed(5, 9)])
    with pytest.raises(ValueError, match="from 3 on"):
        RoutedExperts.concatenate([routed(2, 4), routed(3, 9)])


def test_a_trajectory_lays_every_record_beside_its_position():
    (trajectory,) = build_trajectories(episode_of(*LINE))
    rows = trajectory.routed_experts
    assert (rows.shape, rows.dtype) == ((11, 1, 2), np.int16)
    assert rows[:10, 0].tolist() == [[p, p + 100] for p in range(10)]
    assert rows[10].tolist() == [[-1, -1]]


def test_positions_behind_the_last_record_are_unknown():
    (trajectory,) = build_trajectories(episode_of(*LINE[:3]))
    assert trajectory.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1]


def test_a_branch_takes_the_records_of_its_own_path():
    other = sampled(4, 1, 3, RoutedExperts(6, np.full((3, 1, 2), 7, np.uint8)))
    first, second = build_trajectories(episode_of(*LINE, other))
    assert first.routed_experts[:, 0, 0].tolist() == [*range(10), -1]
    assert second.routed_experts[:, 0, 0].tolist() == [*range(6), 7, 7, 7, -1]


def test_an_episode_without_records_has_none():
    (trajectory,) = build_trajectories(build_episode(build_ticket(), [(4, 0)]))
    assert trajectory.routed_experts is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (routed(0, 5), r"positions \[0, 5\), expected \[0, 6\)"),
        (routed(0, 7), r"positions \[0, 7\), expected \[0, 6\)"),
        (routed(1, 6), r"positions \[1, 6\), expected \[0, 6\)"),
        (RoutedExperts(0, np.zeros((6, 2), np.uint8)), r"shape \(6, 2\)"),
    ],
)
def test_a_record_that_does_not_reach_from_the_last_to_the_token_before_the_end_breaks_the_law(record, message):
    assert re.search(message, sampled(1, 0, 4, record).check_routing(known=0, end=7))


def test_a_record_that_tiles_keeps_the_law():
    assert LINE[1].check_routing(known=0, end=7) is None
    assert LINE[3].check_routing(known=6, end=11) is None
    assert sampled(1, 0, 4, None).check_routing(known=0, end=7) is None


def test_records_survive_the_border_and_json_with_their_type():
    for dtype in (np.uint8, np.uint16):
        episode = episode_of(context(0, None, 3), sampled(1, 0, 4, routed(0, 6, dtype)))
        for back in (
            codec.decode(codec.encode(episode), Episode),
            codec.from_json(codec.to_json(episode), Episode),
        ):
            record = back.nodes[1].sample.routed_experts
            assert (record.start, record.experts.dtype, record.experts.shape) == (0, dtype, (6, 1, 2))
            assert record.experts.tolist() == routed(0, 6).experts.tolist()


def test_a_trajectory_with_experts_survives_the_border():
    (trajectory,) = build_trajectories(episode_of(*LINE))
    back = codec.decode(codec.encode(trajectory), Trajectory)
    assert back.routed_experts.dtype == np.int16
    assert back.routed_experts.tolist() == trajectory.routed_experts.tolist()
