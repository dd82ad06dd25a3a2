from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.advantages import group_advantages

KINDS = ("grpo", "dr_grpo", "leave_one_out")
REWARDS = st.lists(st.tuples(st.sampled_from([0, 1, 5]), st.integers(-8, 8)), min_size=1, max_size=12)


def advantages(rewards: list[float], groups: list[int], kind: str) -> list[float]:
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), kind).tolist()


def naive(rewards: list[float], groups: list[int], kind: str) -> list[float]:
    out = []
    for i, reward in enumerate(rewards):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        mean = sum(mine) / len(mine)
        if kind == "dr_grpo":
            out.append(reward - mean)
        elif kind == "leave_one_out":
            others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
            out.append(reward - sum(others) / len(others) if others else 0.0)
        else:
            std = math.sqrt(sum((r - mean) ** 2 for r in mine) / len(mine))
            out.append((reward - mean) / std if std > 1e-6 else 0.0)
    return out


def test_grpo_by_hand():
    # Mean 1/4, deviation sqrt(3)/4: one win among four is worth sqrt(3), a loss -1/sqrt(3).
    expected = [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]
    assert advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7], "grpo") == pytest.approx(expected)


def test_dr_grpo_by_hand():
    assert advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, "dr_grpo") == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_leave_one_out_by_hand():
    expected = [1.0, -1 / 3, -1 / 3, -1 / 3]
    assert advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, "leave_one_out") == pytest.approx(expected)


def test_groups_do_not_see_each_other_whatever_their_order():
    assert advantages([1.0, 10.0, 3.0, 20.0], [4, 2, 4, 2], "dr_grpo") == pytest.approx([-1, -5, 1, 5])


@pytest.mark.parametrize("kind", KINDS)
@given(REWARDS)
def test_advantages_equal_a_naive_loop(kind, episodes):
    groups, rewards = [g for g, _ in episodes], [r / 4 for _, r in episodes]
    assert advantages(rewards, groups, kind) == pytest.approx(naive(rewards, groups, kind), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero(kind, episodes):
    groups, rewards = [g for g, _ in episodes], [float(r) for _, r in episodes]
    for group in set(groups):
        mine = [a for a, g in zip(advantages(rewards, groups, kind), groups, strict=True) if g == group]
        assert sum(mine) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_agrees_teaches_nothing(kind):
    assert advantages([0.25] * 3, [0] * 3, kind) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_alone_in_its_group_teaches_nothing(kind):
    assert advantages([5.0], [0], kind) == [0.0]


def test_rounding_of_equal_rewards_is_not_blown_up_by_the_deviation():
    assert advantages([0.1 + 0.2, 0.3, 0.3], [0] * 3, "grpo") == [0.0, 0.0, 0.0]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="no advantage of kind 'gpro'"):
        advantages([1.0], [0], "gpro")
