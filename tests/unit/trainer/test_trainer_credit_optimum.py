"""Every rule of credit has the optimum of the outcome, whatever the scorer prefers; known biased ones have not.

Expectations are sums over all episodes, and all groups of them, of a problem that is small enough: nothing is drawn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tabular import (
    CUT_OFF_WORTH,
    MAX_TURNS,
    PLAYS,
    A,
    B,
    expected_gradient,
    gradient_of_return,
    group_table,
    logprobs,
    plays,
    success_after_ascent,
    train_episodes,
)

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.credit import teacher_advantages
from agentrl.types.batch import TrainEpisode

THETA = torch.tensor([[0.3, -0.4, 0.9], [-0.2, 0.5, 0.1]], dtype=torch.float64)
NEAR = {"rtol": 1e-5, "atol": 1e-6}  # columns are float32


def rule(kind: str, **options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage="leave_one_out", credit={"kind": kind, **options})


RULES = {
    "outcome": rule("outcome"),
    "shaping": rule("shaping", scorer="process"),
    "shaping, discounted": rule("shaping", scorer="process", gamma=0.8),
    "turns": rule("turn_leave_one_out"),
    "turns, discounted": rule("turn_leave_one_out", gamma=0.8),
    "turns, shaped": rule("turn_leave_one_out", scorer="process"),
    "turns, shaped and discounted": rule("turn_leave_one_out", scorer="process", gamma=0.8),
    "same state": rule("same_state"),
}


def gamma_of(algorithm: AlgorithmConfig) -> float:
    return algorithm.credit.model_dump().get("gamma", 1.0)


def test_the_problem_has_what_the_rules_are_to_withstand():
    assert len(PLAYS) == 13
    assert sum(play.is_cut_off for play in PLAYS) == 5
    assert max(play.discounted(1.0) for play in PLAYS) == max(p.discounted(1.0) for p in PLAYS if p.end == "won")
    assert max(PLAYS, key=lambda play: play.values[-1]).is_cut_off, "the scorer likes what is cut off best"


@pytest.mark.parametrize("gives", ["prior and value", "prior", "value"])
@pytest.mark.parametrize("name", RULES)
def test_the_expected_gradient_is_that_of_the_expected_return(name, gives):
    algorithm = RULES[name]
    table = group_table(algorithm, [train_episodes(algorithm, gives)] * 2)
    expected = gradient_of_return(THETA, gamma_of(algorithm))
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(expected_gradient(THETA, table), expected, **NEAR)


@pytest.mark.long
@pytest.mark.parametrize("name", ["shaping, discounted", "turns, shaped and discounted"])
def test_so_it_is_in_groups_of_three_of_which_some_reach_a_turn_and_some_have_no_scores(name):
    algorithm = RULES[name]
    scored, unscored = (train_episodes(algorithm, gives) for gives in ("value", ""))
    expected = gradient_of_return(THETA, gamma_of(algorithm))
    for members in ([scored, scored, unscored], [unscored, scored, scored]):
        table = group_table(algorithm, members)
        torch.testing.assert_close(expected_gradient(THETA, table), expected, **NEAR)


@pytest.mark.parametrize("name", [name for name in RULES if "discounted" not in name])
def test_ascent_by_a_rule_ends_at_the_optimum_of_the_outcome(name):
    algorithm = RULES[name]
    assert success_after_ascent(group_table(algorithm, [train_episodes(algorithm)] * 2)) > 0.95


def table_of(advantage) -> torch.Tensor:
    """[N, N, K] of a rule that is written down here: of a play, the other of its group, and a turn."""
    table = torch.zeros(len(PLAYS), len(PLAYS), MAX_TURNS, dtype=torch.float64)
    for i, mine in enumerate(PLAYS):
        for j, other in enumerate(PLAYS):
            for turn in range(len(mine.moves)):
                table[i, j, turn] = advantage(mine, other, turn)
    return table


def whole(play) -> float:
    return play.outcome + sum(play.rewards)


def centred(mine, other, turn: int) -> float:
    """What a leave-one-out baseline makes of the reward."""
    return whole(mine) - whole(other)


def raw_scores(mine, other, turn: int) -> float:
    return centred(mine, other, turn) + sum(mine.values[turn:])


def raw_differences(mine, other, turn: int) -> float:
    """s_k - s_(k-1) as rewards, to go."""
    steps = [value - prior for value, prior in zip(mine.values, mine.priors, strict=True)]
    return centred(mine, other, turn) + sum(steps[turn:])


def potential_behind_the_cut(mine, other, turn: int) -> float:
    """Phi = 0 at endings but for truncation, where the state \"goes on\"."""
    left = CUT_OFF_WORTH if mine.is_cut_off else 0.0
    return centred(mine, other, turn) + left - (mine.priors[turn] - mine.priors[0])


def accumulated_by_turn(mine, other, turn: int) -> float:
    """Rewards of turns less their means by turn, accumulated (verl issue 7244); the other's where it got so far."""
    own, others = ([*play.rewards[:-1], play.rewards[-1] + play.outcome] for play in (mine, other))
    means = [others[n] if n < len(others) else 0.0 for n in range(len(own))]
    return sum(own[turn:]) - sum(means[turn:])


def divided_by_the_deviation(mine, other, turn: int) -> float:
    deviation = float(np.std([whole(mine), whole(other)], ddof=1))
    return (centred(mine, other, turn) / 2 - (mine.priors[turn] - mine.priors[0])) / (deviation + 1e-4)


def without_groups_that_agree(mine, other, turn: int) -> float:
    agree = whole(mine) == whole(other)
    return 0.0 if agree else centred(mine, other, turn) - (mine.priors[turn] - mine.priors[0])


BIASED = [
    raw_scores,
    raw_differences,
    potential_behind_the_cut,
    accumulated_by_turn,
    divided_by_the_deviation,
    without_groups_that_agree,
]


@pytest.mark.parametrize("biased", BIASED)
def test_known_biased_rules_have_another_gradient(biased):
    mine, right = expected_gradient(THETA, table_of(biased)), gradient_of_return(THETA)
    assert float((mine - right).abs().max()) > 0.003
    cosine = float(torch.nn.functional.cosine_similarity(mine.flatten(), right.flatten(), dim=0))
    assert cosine < 0.999, "not even its direction"


@pytest.mark.parametrize("biased", [raw_scores, raw_differences, potential_behind_the_cut])
def test_ascent_by_a_biased_rule_ends_where_the_scorer_wants_it(biased):
    assert success_after_ascent(table_of(biased)) < 0.1


FORK = ((A, 0),)
BEHIND = [number for number, play in enumerate(PLAYS) if play.moves[:1] == FORK]


def forked(algorithm: AlgorithmConfig) -> list[TrainEpisode]:
    """Plays that went on from B in the second turn, of which tokens behind that alone are in the loss."""
    episodes = []
    for number in BEHIND:
        episode = train_episodes(algorithm)[number]
        (trained,) = episode.trajectories
        mask = trained.loss_mask & (trained.trajectory.turns >= len(FORK))
        trained = dataclasses.replace(trained, loss_mask=mask)
        episodes.append(dataclasses.replace(episode, fork="B", trajectories=(trained,)))
    return episodes


def test_forks_of_a_state_give_the_gradient_of_its_worth():
    algorithm = RULES["same state"]
    table = group_table(algorithm, [forked(algorithm)] * 2)
    behind = list(plays(B, FORK))
    assert [PLAYS[number] for number in BEHIND] == behind
    leaf = THETA.clone().requires_grad_()
    log_softmax = leaf.log_softmax(1)
    logprobs_NK = torch.stack([sum((log_softmax[m] for m in play.moves[1:]), torch.zeros(())) for play in behind])
    probabilities = logprobs_NK.exp()
    worth = (probabilities * torch.tensor([whole(play) for play in behind])).sum()
    (expected,) = torch.autograd.grad(worth, leaf, retain_graph=True)
    assert float(probabilities.detach().sum()) == pytest.approx(1.0)
    means = torch.einsum("ijk,j->ik", table, probabilities.detach())
    assert not means[:, 0].any()
    # Each play's tokens behind the fork have one advantage in a turn: of this rule that of the outcome.
    found = torch.autograd.grad((probabilities.detach() * means[:, 1] * logprobs_NK).sum(), leaf)[0]
    torch.testing.assert_close(found, expected, **NEAR)


def test_an_episode_is_not_compared_with_what_went_on_from_its_own_states():
    """An episode that went to B in its first turn has a fork from there beside it in the group; others have none."""
    algorithm = RULES["same state"]
    fork = forked(algorithm)[0]
    group = [train_episodes(algorithm)[n] for n in (BEHIND[1], 0)]
    both = group_table(algorithm, [[group[0]], [group[1]], [fork]])
    alone = group_table(algorithm, [[group[0]], [group[1]]])
    assert torch.equal(both.flatten(), alone.flatten())
    assert alone.abs().max() > 0.05


def test_a_teacher_alone_gives_the_gradient_of_the_reverse_kl_at_each_state_as_it_is_met():
    teacher = torch.tensor([[1.0, -1.0, 0.2], [-0.5, 0.3, 0.9]], dtype=torch.float64).log_softmax(1)
    theta = THETA
    for _ in range(2000):
        leaf = theta.clone().requires_grad_()
        own = leaf.log_softmax(1)
        logprobs_NK = logprobs(leaf)
        probabilities = logprobs_NK.detach().sum(1).exp()
        visits = torch.zeros(2, dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)
        for play, probability in zip(PLAYS, probabilities, strict=True):
            for state, action in play.moves:
                visits[state] += probability
                none = torch.zeros(1, dtype=torch.float64)
                now = own[state, action][None]
                credit = teacher_advantages(none, now, teacher[state, action][None], 1.0)
                loss = loss + probability * (credit * now).sum()
        (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        kl_per_state = (own.exp() * (own - teacher)).sum(1)
        (expected,) = torch.autograd.grad(-(visits * kl_per_state).sum(), leaf)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        if float(expected.abs().max()) < 1e-4:
            break
        theta = theta + 2.0 * expected
    torch.testing.assert_close(theta.softmax(1), teacher.exp(), rtol=0, atol=1e-2)
