"""Scores of turns beside the tokens that they are of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from agentrl.buffer.staleness import train_view
from agentrl.buffer.turn_columns import turn_rewards, with_turn_columns
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.batch import NO_COLUMNS, CreditColumns, TrainTrajectory
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Agent, Episode, Node, Turn
from agentrl.types.errors import Boundary, Failure
from agentrl.types.score import scored_turns, with_scores
from agentrl.types.turn_score import TurnScore
from agentrl.types.version import PolicyVersion

V0 = PolicyVersion(0, 0)
POTENTIALS, TEACHER = CreditColumns(potentials="prm"), CreditColumns(teacher="big")


def episode_with(scorer: str, *said: dict | None, replies: tuple[int, ...] = (2, 3, 1)) -> Episode:
    """Prompt of 1, replies of these tokens and context of 2 between; what was said of each turn, None for nothing."""
    episode = build_episode(build_ticket(), [(count, 0) for count in replies], prompt_tokens=1)
    return scored(episode, scorer, *said)


def scored(episode: Episode, scorer: str, *said: dict | None) -> Episode:
    pairs = zip(scored_turns(episode), said, strict=True)
    scores = tuple(TurnScore(turn.key, "v", **words) for turn, words in pairs if words is not None)
    return dataclasses.replace(episode, turn_scores={scorer: scores})


def views(episode: Episode, wanted: CreditColumns, policy: str = "main") -> tuple[TrainTrajectory, ...]:
    return with_turn_columns(episode, train_view(episode, policy, V0, 0), wanted)


def test_a_credit_that_asks_for_nothing_gets_nothing():
    (view,) = views(episode_with("prm", *[{"value": 1.0}] * 3), NO_COLUMNS)
    assert (view.potentials, view.turn_rewards, view.teacher_logprobs) == (None, None, None)


def test_the_potential_of_a_reply_is_what_its_state_was_worth_before_it():
    said = {"value": 0.9, "prior": 0.5}, {"value": 0.8, "prior": 0.25}, {"value": 0.1, "prior": 0.75}
    (view,) = views(episode_with("prm", *said), POTENTIALS)
    assert view.potentials.tolist() == [0, *[0.5] * 2, 0, 0, *[0.25] * 3, 0, 0, 0.75]
    assert view.potentials.dtype == np.float32


def test_without_priors_it_is_the_value_of_the_turn_before_and_the_last_value_is_nobodys():
    (view,) = views(episode_with("prm", {"value": 0.5}, {"value": 0.25}, {"value": 9.0}), POTENTIALS)
    assert np.isnan(view.potentials[1:3]).all()
    assert view.potentials[3:].tolist() == [0, 0, *[0.5] * 3, 0, 0, 0.25]


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {"failure": Failure(Boundary.SCORER, "deadline", "late")},
        {"logprobs": np.zeros(3, np.float32)},
    ],
)
def test_an_episode_of_which_one_turn_has_no_score_has_none_at_all(broken):
    (view,) = views(episode_with("prm", {"value": 0.5}, broken, {"value": 0.5}), POTENTIALS)
    assert view.potentials is None


def test_a_score_of_other_tokens_joins_no_turn():
    episode = episode_with("prm", *[{"value": 0.5}] * 3)
    first, second, third = episode.turn_scores["prm"]
    other = dataclasses.replace(second, key=dataclasses.replace(second.key, digest=first.key.digest))
    mixed = dataclasses.replace(episode, turn_scores={"prm": (first, other, third)})
    assert views(mixed, POTENTIALS)[0].potentials is None
    assert views(episode, CreditColumns(potentials="another"))[0].potentials is None


def test_scores_that_came_after_their_episode_had_gone_on_without_them_are_not_laid():
    episode = episode_with("prm", *[{"value": 0.5}] * 3)
    late = Failure(Boundary.TIMEOUT, "scorer.prm", "1 of 3 turns were not scored in time")
    for failure, is_laid in ((None, True), (late, False)):
        record = ScoreRecord("prm", None if failure else Score(0.5), 0.0, failure)
        found = dataclasses.replace(episode, scores=(ScoreRecord("verifier", Score(1.0)), record))
        assert (views(found, POTENTIALS)[0].potentials is not None) == is_laid


def test_a_teachers_log_probabilities_lie_at_the_tokens_that_they_are_of():
    said = [{"logprobs": np.array(values, np.float32)} for values in ([-1, -2], [-3, -4, -5], [-6])]
    (view,) = views(episode_with("big", *said), TEACHER)
    assert view.teacher_logprobs.tolist() == [0, -1, -2, 0, 0, -3, -4, -5, 0, 0, -6]
    short = [*said[:1], {"logprobs": np.zeros(2, np.float32)}, *said[2:]]
    assert views(episode_with("big", *short), TEACHER)[0].teacher_logprobs is None


def branched() -> Episode:
    """A turn with two branches behind it, each of one turn."""
    episode = build_episode(build_ticket(), [(2, 0), (3, 0)], prompt_tokens=1)
    context = Node(4, 1, "agent", 2, np.array([7], np.int32))
    leaf = dataclasses.replace(episode.nodes[3], index=5, parent=4, turn=2)
    nodes = (*episode.nodes, context, leaf)
    return dataclasses.replace(episode, nodes=nodes, turns=(*episode.turns, Turn(2, "agent", 5)))


def test_the_turn_before_is_that_of_the_same_branch():
    episode = scored(branched(), "prm", {"value": 0.5}, {"value": 0.25}, {"value": 0.75})
    one, other = views(episode, POTENTIALS)
    assert one.potentials[3:].tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert other.potentials[3:].tolist() == [0, 0.5, 0.5, 0.5]


def test_scores_of_another_policys_turns_need_not_be_there():
    episode = branched()
    nodes = tuple(dataclasses.replace(n, agent="rival") if n.index > 3 else n for n in episode.nodes)
    nodes = (*nodes[:4], dataclasses.replace(nodes[4], parent=None), nodes[5])
    turns = (*episode.turns[:2], Turn(2, "rival", 5))
    agents = (Agent("agent", "main"), Agent("rival", "other"))
    two = dataclasses.replace(episode, nodes=nodes, turns=turns, agents=agents)
    two = scored(two, "prm", {"value": 0.5}, {"value": 0.25}, None)
    assert views(two, POTENTIALS)[0].potentials is not None
    assert views(two, POTENTIALS, "other")[0].potentials is None


def test_rewards_of_turns_are_weighted_as_in_the_reward_that_has_them():
    episode = build_episode(build_ticket(), [(2, 0), (1, 0)], prompt_tokens=1)
    records = [
        ScoreRecord("verifier", Score(1.0, turn_rewards={0: 0.5, 1: -0.25})),
        ScoreRecord("style", Score(0.0, turn_rewards={1: 2.0}), weight=0.5),
        ScoreRecord("watch", Score(0.0, turn_rewards={0: 9.0}), weight=0.0),
        ScoreRecord("late", None, weight=0.0),
    ]
    episode = with_scores(episode, records)
    assert turn_rewards(episode) == {0: 0.5, 1: 0.75}
    (view,) = views(episode, CreditColumns(turn_rewards=True))
    assert view.turn_rewards.tolist() == [0, 0.5, 0.5, 0, 0, 0.75]
    assert episode.reward == pytest.approx(1.0 + 0.5 + 0.75), "they are part of the reward already"
