from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types.version import PolicyVersion, VersionSpan, append_spans, spans_tile

VERSIONS = st.builds(PolicyVersion, st.integers(0, 3), st.integers(0, 50))
RUNS = st.lists(st.tuples(VERSIONS, st.integers(1, 6)), max_size=6)


def as_spans(runs: list[tuple[PolicyVersion, int]]) -> tuple[VersionSpan, ...]:
    spans, at = [], 0
    for version, count in runs:
        spans.append(VersionSpan(version, at, at + count))
        at += count
    return tuple(spans)


def per_token(runs: list[tuple[PolicyVersion, int]]) -> list[PolicyVersion]:
    return [version for version, count in runs for _ in range(count)]


@given(RUNS, RUNS)
def test_appended_spans_name_the_writer_of_every_token(first, second):
    joined = append_spans(append_spans((), as_spans(first)), as_spans(second))
    assert [s.version for s in joined for _ in range(s.start, s.end)] == per_token(first) + per_token(second)


@given(RUNS, RUNS)
def test_appended_spans_tile_and_neighbours_differ(first, second):
    joined = append_spans(append_spans((), as_spans(first)), as_spans(second))
    assert spans_tile(joined, len(per_token(first)) + len(per_token(second)))
    assert all(a.version != b.version for a, b in itertools.pairwise(joined))


def test_a_reply_continued_under_the_same_version_stays_one_span():
    v7, v8 = PolicyVersion(0, 7), PolicyVersion(0, 8)
    spans = append_spans((VersionSpan(v7, 0, 40),), [VersionSpan(v7, 0, 5), VersionSpan(v8, 5, 80)])
    assert spans == (VersionSpan(v7, 0, 45), VersionSpan(v8, 45, 120))


@pytest.mark.parametrize(
    ("bounds", "num_tokens"),
    [
        ([(0, 2), (3, 5)], 5),  # gap
        ([(0, 3), (2, 5)], 5),  # overlap
        ([(0, 2), (2, 2), (2, 5)], 5),  # empty span
        ([(1, 5)], 5),  # late start
        ([(0, 4)], 5),  # too short
        ([(0, 6)], 5),  # too long
        ([(2, 5), (0, 2)], 5),  # out of order
        ([], 1),
    ],
)
def test_spans_that_do_not_tile_are_told(bounds, num_tokens):
    assert not spans_tile([VersionSpan(PolicyVersion(0, i), *b) for i, b in enumerate(bounds)], num_tokens)


@given(VERSIONS)
def test_a_version_reads_back_as_it_was_written(version):
    assert PolicyVersion.parse(str(version)) == version


@pytest.mark.parametrize("text", ["", "17", "0.", ".3", "0.-1", "a.b", "0.1.2", "default", "0. 1"])
def test_text_that_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match=r"epoch\.step|invalid literal"):
        PolicyVersion.parse(text)


def test_versions_order_by_epoch_before_step():
    assert sorted([PolicyVersion(1, 3), PolicyVersion(0, 17), PolicyVersion(0, 2)]) == [
        PolicyVersion(0, 2),
        PolicyVersion(0, 17),
        PolicyVersion(1, 3),
    ]


def test_staleness_counts_optimizer_steps_across_epochs():
    version = PolicyVersion(0, 17).next()
    assert version == PolicyVersion(0, 18)
    assert version.steps_since(PolicyVersion(0, 15)) == 3
    assert PolicyVersion(1, 18).steps_since(PolicyVersion(0, 18)) == 0


def test_a_version_counter_that_went_backwards_is_an_error():
    with pytest.raises(ValueError, match=r"0\.5 is newer than 0\.4"):
        PolicyVersion(0, 4).steps_since(PolicyVersion(0, 5))
