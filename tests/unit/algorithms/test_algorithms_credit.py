"""Rules of credit by hand and against loops that are written from their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.credit import AgentTurns, shaping_advantages, teacher_advantages, turn_advantages
from agentrl.config.base import parse_config
from agentrl.types.errors import ConfigError

NAN = math.nan


def turns(outcome: float, rewards: list[float], potentials: list[float] | None = None) -> AgentTurns:
    scored = None if potentials is None else np.array(potentials, float)
    return AgentTurns(outcome, np.array(rewards, float), scored)


def test_returns_to_go_by_hand():
    # The outcome comes with the last turn: .5 + .8 (0 + .8 (.2 + 1)).
    episode = turns(1.0, [0.5, 0.0, 0.2])
    assert episode.returns_to_go(0.8).tolist() == pytest.approx([0.5 + 0.64 * 1.2, 0.8 * 1.2, 1.2])
    assert episode.whole_return(1.0) == pytest.approx(1.7)
    assert turns(0.3, []).whole_return(0.5) == 0.3


def test_shaping_by_hand():
    won, lost = turns(1.0, [0.0, 0.0], [0.5, 0.9]), turns(0.0, [0.0, 0.0])
    first, second = shaping_advantages([won, lost], [0, 0], 1.0)
    assert first.tolist() == pytest.approx([1.0, 0.6])
    assert second.tolist() == pytest.approx([-1.0, -1.0])


def test_shaping_is_the_sum_of_shaped_rewards_to_go_of_which_every_ending_has_potential_0():
    gamma, rewards, potentials, outcome = 0.9, [0.1, -0.2, 0.3], [0.4, 0.8, 0.2], 1.0
    states = [*potentials, 0.0]
    shaped = [r + gamma * states[k + 1] - states[k] for k, r in enumerate(rewards)]
    shaped[-1] += outcome
    to_go = [sum(gamma ** (m - k) * shaped[m] for m in range(k, 3)) for k in range(3)]
    # The other's shaped return from the same first state is the baseline.
    other = 0.5 + gamma * 0.5
    expected = [gamma**k * (to_go[k] - (other - potentials[0])) for k in range(3)]
    mine = shaping_advantages([turns(outcome, rewards, potentials), turns(0.5, [0.5, 0.0])], [0, 0], gamma)[0]
    assert mine.tolist() == pytest.approx(expected)


def test_a_state_of_which_the_scorer_says_nothing_is_worth_what_the_others_got():
    mine, _ = shaping_advantages([turns(1.0, [0.0, 0.0, 0.0], [NAN, 0.7, NAN]), turns(0.25, [0.0])], [0, 0], 1.0)
    # Behind the opening the score stands alone: 1 - .7; where it is silent, the others' mean.
    assert mine.tolist() == pytest.approx([0.75, 0.3, 0.75])


def test_a_reply_before_which_the_outcome_was_decided_gets_nothing():
    episodes = [turns(1.0, [0.0] * 3, [0.5, 1.0, 1.0]), turns(0.0, [0.0] * 3, [0.5, 0.5, 0.0])]
    won, lost = shaping_advantages(episodes, [0, 0], 1.0)
    assert (won.tolist(), lost.tolist()) == ([1.0, 0.5, 0.5], [-1.0, -1.0, -0.5])
    assert np.diff([1.0 - 0.5, *won[1:]]).tolist() == [0.0, 0.0]


def test_turns_are_compared_with_the_others_that_got_there():
    episodes = [turns(1.0, [0.1, 0.2, 0.4]), turns(0.0, [0.3, 0.5]), turns(2.0, [0.6])]
    first, second, third = turn_advantages(episodes, ["a", "a", "a"], 1.0)
    # To go: 1.7, 1.6, 1.4; .8, .5; 2.6. No other got to the third turn: their means from the start are the baseline.
    assert first.tolist() == pytest.approx([1.7 - (0.8 + 2.6) / 2, 1.6 - 0.5, 1.4 - (0.8 + 2.6) / 2])
    assert second.tolist() == pytest.approx([0.8 - (1.7 + 2.6) / 2, 0.5 - 1.6])
    assert third.tolist() == pytest.approx([2.6 - (1.7 + 0.8) / 2])


def test_groups_do_not_see_each_other_and_one_alone_learns_nothing():
    episodes = [turns(5.0, [1.0, 2.0], [0.3, 0.4]), turns(1.0, [0.0]), turns(0.0, [0.0])]
    for rule in (shaping_advantages, turn_advantages):
        found = rule(episodes, [("g", 1), ("g", 0), ("g", 0)], 1.0)
        assert [values.tolist() for values in found] == [[0.0, 0.0], [1.0], [-1.0]]


POTENTIALS = st.one_of(st.none(), st.lists(st.one_of(st.just(NAN), st.integers(-4, 4)), min_size=4, max_size=4))
EPISODES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(-4, 4), st.lists(st.integers(-2, 2), max_size=4), POTENTIALS), min_size=1
)


def naive_to_go(rewards: list[float], outcome: float, gamma: float, turn: int) -> float:
    steps = len(rewards)
    return sum(gamma ** (m - turn) * rewards[m] for m in range(turn, steps)) + gamma ** (steps - 1 - turn) * outcome


def naive(rule: str, episodes: list, gamma: float) -> list[list[float]]:
    def start(episode) -> float:
        _, outcome, rewards, _ = episode
        return naive_to_go(rewards, outcome, gamma, 0) if rewards else outcome

    def known(episode, turn: int) -> bool:
        return episode[3] is not None and not math.isnan(episode[3][turn])

    out = []
    for i, episode in enumerate(episodes):
        group, outcome, rewards, potentials = episode
        others = [e for j, e in enumerate(episodes) if e[0] == group and j != i]
        mine = []
        for turn in range(len(rewards)):
            if not others:
                mine.append(0.0)
                continue
            to_go, baseline = naive_to_go(rewards, outcome, gamma, turn), sum(map(start, others)) / len(others)
            worth = potentials[turn] if known(episode, turn) else None
            first = potentials[0] if known(episode, 0) else baseline
            value = to_go - baseline - (0.0 if worth is None else worth - first)
            there = [e for e in others if len(e[2]) > turn and (worth is None or known(e, turn))]
            if rule == "turns" and there:
                theirs = [naive_to_go(e[2], e[1], gamma, turn) - (0.0 if worth is None else e[3][turn]) for e in there]
                value = to_go - (worth or 0.0) - sum(theirs) / len(theirs)
            mine.append(gamma**turn * value)
        out.append(mine)
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@given(EPISODES)
def test_both_rules_equal_a_naive_loop(gamma, episodes):
    units = [turns(float(o), r, None if p is None else p[: len(r)]) for _, o, r, p in episodes]
    members = [group for group, *_ in episodes]
    for name, rule in (("shaping", shaping_advantages), ("turns", turn_advantages)):
        for mine, expected in zip(rule(units, members, gamma), naive(name, episodes, gamma), strict=True):
            assert mine.tolist() == pytest.approx(expected, abs=1e-9)


def test_a_teacher_adds_its_gap_where_it_is_known_and_is_no_part_of_the_graph():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    teacher = torch.tensor([-0.5, NAN, -1.5])
    found = teacher_advantages(torch.tensor([0.25, 0.5, 0.0]), logprobs, teacher, 0.5)
    assert found.tolist() == pytest.approx([0.25 + 0.25, 0.5, -0.5])
    assert not found.requires_grad


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("credit", [{"kind": "shaping", "scorer": "prm"}, {"kind": "turn_leave_one_out"}])
def test_rules_for_turns_have_one_baseline_that_keeps_the_optimum(kind, credit):
    with pytest.raises(ConfigError, match=r'set advantage = "leave_one_out"'):
        parse_config(AlgorithmConfig, {"advantage": kind, "credit": credit}, "algorithm")
    assert parse_config(AlgorithmConfig, {"advantage": "leave_one_out", "credit": credit}, "a").credit.gamma == 1.0
