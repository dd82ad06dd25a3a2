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
            std = math.sqrt(sum((r - mean) ** 2 for r in mine) / max(len(mine) - 1, 1))
            out.append((reward - mean) / (std + 1e-4))
    return out


def test_grpo_by_hand():
    # Mean 1/4; squares of 9/16 and three times 1/16 make 3/4, over three 1/4: a deviation of 1/2.
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7], "grpo") == pytest.approx(expected, rel=1e-6)
    assert expected[:2] == pytest.approx([1.4997, -0.4999], abs=1e-6)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.3, 0.7, 0.1], [2.0, 5.0]])
def test_grpo_is_the_formula_of_peers_on_the_sample_deviation(rewards):
    """TRL divides by torch.std + 1e-4, verl by torch.std + 1e-6; both deviations are over G - 1."""
    centred = torch.tensor(rewards) - torch.tensor(rewards).mean()
    trl, verl = (centred / (torch.tensor(rewards).std() + epsilon) for epsilon in (1e-4, 1e-6))
    mine = advantages(rewards, [0] * len(rewards), "grpo")
    assert mine == pytest.approx(trl.tolist(), rel=1e-5)
    assert mine == pytest.approx(verl.tolist(), rel=1e-3)


def test_rewards_that_nearly_agree_have_small_advantages():
    # Deviation 3e-6 / sqrt(2) = 2.12e-6: 1.5e-6 over 1.0212e-4.
    assert advantages([0.0, 3e-6], [0, 0], "grpo") == pytest.approx([-0.014688, 0.014688], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.floats(0, 3e-6), min_size=1, max_size=16))
def test_rewards_within_a_few_millionths_never_have_advantages_above_one(kind, rewards):
    assert max(map(abs, advantages([1.0 + r for r in rewards], [0] * len(rewards), kind))) < 0.2


def test_a_failed_sibling_is_absent_from_mean_and_deviation():
    # Of three, the third failed for no fault of the policy and is not in the batch. As a 0 it would be a reward.
    two, with_zero = advantages([1.0, 0.0], [0, 0], "grpo"), advantages([1.0, 0.0, 0.0], [0, 0, 0], "grpo")
    assert two == pytest.approx([0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)])
    assert with_zero[0] > 1.1 > two[0]


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
