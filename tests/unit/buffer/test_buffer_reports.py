from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_lines import dropped, trained

from agentrl.buffer.reports import bias, closed_cohort, compare, goodput, ks_distance

SAMPLES = st.lists(st.integers(0, 9), min_size=1, max_size=20)


def names(lines):
    return [line.episode_id for line in lines]


def test_goodput_says_what_became_of_every_sampled_token():
    lines = [trained(0, 0, tokens=8, masked=2), trained(0, 1, tokens=4), dropped(1, 0, "no_spread", 6), dropped(2, 0)]
    fractions = goodput(lines)
    assert fractions == pytest.approx(
        {"trained": 10 / 28, "dropped_too_old": 10 / 28, "dropped_no_spread": 6 / 28, "masked": 2 / 28}
    )
    assert goodput([]) == {}


def test_what_was_lost_and_sampled_again_is_a_part_of_all_that_was_sampled():
    lines = [trained(0, tokens=12, regenerated_tokens=3), dropped(1, tokens=4, regenerated_tokens=1)]
    assert goodput(lines) == pytest.approx({"trained": 0.6, "dropped_too_old": 0.2, "regenerated": 0.2, "masked": 0})


def test_a_cohort_ends_before_the_first_group_that_the_runs_end_cut_off():
    lines = [trained(0), dropped(1), trained(3), dropped(2, reason="run_ended", tokens=1), trained(4)]
    assert names(closed_cohort(lines)) == names([trained(0), dropped(1)])


def test_a_cohort_ends_before_a_group_that_is_still_on_its_way():
    full = [trained(n, member) for n in (0, 1, 4) for member in (0, 1)]
    assert names(closed_cohort([*full, trained(3, 0), trained(3, 1)])) == names(full[:4])
    half_failed = dropped(2, 0, "environment_crashed")
    assert names(closed_cohort([*full, half_failed])) == names(full[:4])
    assert closed_cohort(full[2:]) == []


def test_a_retry_that_was_cut_off_keeps_its_group_open():
    lines = [trained(0, 0), dropped(1, 0, "environment_crashed"), trained(2, 0)]
    retry = dropped(1, 0, "run_ended", episode_id="train-000001-0-retry1", attempt=1)
    assert names(closed_cohort([*lines, retry])) == ["train-000000-0"]


def test_of_an_episode_that_a_resumed_run_played_again_the_last_line_counts():
    lines = [trained(0), dropped(1, reason="run_ended", tokens=1), trained(1, tokens=7), trained(2)]
    assert [line.sampled_tokens for line in closed_cohort(lines)] == [10, 7, 10]


def test_nothing_ended_is_no_cohort_and_no_bias():
    assert closed_cohort([]) == []
    [report] = bias([dropped(0)])
    assert (report.num_dispatched, report.num_trained, report.comparisons) == (1, 0, ())


def test_bias_compares_what_was_trained_with_all_that_was_dispatched():
    lines = [
        trained(0, 0, tokens=10, masked=5, turns=2, tool_s=1.0, reward=1.0),
        dropped(0, 1, tokens=30, turns=4, tool_s=3.0, reward=0.0),
        trained(1, 0, tokens=20, turns=3, tool_s=2.0, reward=1.0),
        trained(1, 1, tokens=20, masked=20, turns=3, tool_s=2.0, reward=1.0),  # nothing of it entered a loss
    ]
    [report] = bias(lines)
    assert (report.num_dispatched, report.num_trained) == (4, 2)
    means = {c.measure: (c.dispatched_mean, c.trained_mean) for c in report.comparisons}
    assert means == {
        "length": (20.0, 15.0),
        "trained tokens": (20.0, 12.5),
        "turns": (3.0, 2.5),
        "tool seconds": (2.0, 1.5),
        "difficulty": (0.25, 0.25),
    }
    assert [c.ratio for c in report.comparisons] == pytest.approx([0.75, 0.625, 2.5 / 3, 0.75, 1.0])


def test_environments_are_compared_each_by_itself():
    """Of the short ones every second is dropped whatever its length: together they would look like a bias."""
    long = [trained(n, tokens=100, environment="long") for n in range(0, 40, 2)]
    short = [(trained if n % 4 == 1 else dropped)(n, tokens=10, environment="short") for n in range(1, 40, 2)]
    of_long, of_short = bias([*short, *long])
    assert (of_long.environment, of_long.num_dispatched, of_long.num_trained) == ("long", 20, 20)
    assert (of_short.environment, of_short.num_dispatched, of_short.num_trained) == ("short", 20, 10)
    assert [report.comparisons[0].ratio for report in (of_long, of_short)] == [1.0, 1.0]


def test_a_group_without_rewards_has_no_difficulty_and_is_left_out_of_it_alone():
    lines = [trained(0, reward=0.25), dropped(1, reason="environment_crashed", reward=None, tokens=30)]
    comparisons = {c.measure: c for c in bias(lines)[0].comparisons}
    assert comparisons["difficulty"].dispatched_mean == 0.75
    assert comparisons["length"].dispatched_mean == 20


def test_where_everything_is_trained_the_interval_is_a_point():
    [length, *_] = bias([trained(n, tokens=n + 1) for n in range(20)])[0].comparisons
    assert (length.ratio, length.ratio_low, length.ratio_high, length.ks) == (1.0, 1.0, 1.0, 0.0)


def test_a_mean_of_zero_has_no_ratio():
    comparison = compare("x", np.zeros(2), np.zeros(2), np.array([True, False]), np.array([0, 1]))
    assert math.isnan(comparison.ratio)
    assert math.isnan(comparison.ratio_low)


def test_the_interval_covers_the_true_ratio_about_19_times_in_20():
    """Half of all episodes are trained by chance, so the true ratio is 1."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(100):
        values = rng.lognormal(0.0, 1.0, 200)
        is_trained = rng.random(200) < 0.5
        found = compare("x", values, values, is_trained, np.arange(200))
        covered.append(found.ratio_low <= 1.0 <= found.ratio_high)
    assert 88 <= sum(covered) <= 99


def test_episodes_of_a_group_that_go_together_make_the_interval_wider():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(50), 8)
    values = np.repeat(rng.lognormal(0.0, 1.0, 50), 8)
    is_trained = np.repeat(rng.random(50) < 0.5, 8)
    together = compare("x", values, values, is_trained, groups)
    apart = compare("x", values, values, is_trained, np.arange(400))
    assert together.ratio_high - together.ratio_low > 2 * (apart.ratio_high - apart.ratio_low)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [1, 2], 0.5),
        ([1, 2], [3, 4], 1.0),
        ([1, 1, 5], [1, 5, 5], 1 / 3),  # at most 1: two thirds and one third
        ([7], [7, 7, 7], 0.0),
    ],
)
def test_the_distance_of_two_samples_worked_by_hand(first, second, expected):
    assert ks_distance(np.array(first), np.array(second)) == pytest.approx(expected)


@given(SAMPLES, SAMPLES)
def test_the_distance_is_the_largest_gap_of_the_two_distribution_functions(first, second):
    gaps = [
        abs(sum(x <= value for x in first) / len(first) - sum(x <= value for x in second) / len(second))
        for value in range(10)
    ]
    assert ks_distance(np.array(first), np.array(second)) == pytest.approx(max(gaps))
