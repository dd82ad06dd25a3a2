from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Agent, Episode, StopReason
from agentrl.types.errors import Boundary, Failure
from agentrl.types.score import combined, with_scores

LATE = Failure(Boundary.TIMEOUT, "scorer.style", "no result within 1 s")
TURNS = {0: "white", 1: "black", 2: "white"}
BOTH = ["white", "black"]


def game() -> Episode:
    """White and black act by a policy each; three turns."""
    played = build_episode(build_ticket(), [(1, 0), (1, 0), (1, 0)], reward=None)
    turns = tuple(replace(turn, agent=TURNS[turn.index]) for turn in played.turns)
    return replace(played, agents=(Agent("white", "a"), Agent("black", "b")), turns=turns)


def test_the_reward_is_the_weighted_sum_of_scores():
    scores = [ScoreRecord("verifier", Score(1.0)), ScoreRecord("style", Score(0.5), weight=0.2)]
    found = combined(scores, {}, ["agent"])
    assert (found.reward, found.by_agent) == (pytest.approx(1.1), {})


def test_a_score_of_weight_0_is_a_metric_and_no_reward():
    scores = [ScoreRecord("verifier", Score(1.0, {"rows": 3.0})), ScoreRecord("length", Score(70.0), weight=0.0)]
    found = combined(scores, {}, ["agent"])
    assert found.reward == 1.0
    assert found.metrics == {"verifier/rows": 3.0, "verifier/reward": 1.0, "length/reward": 70.0}
    assert combined(scores[1:], {}, ["agent"]).reward is None


def test_metrics_of_the_only_scorer_have_its_own_names():
    assert combined([ScoreRecord("verifier", Score(1.0, {"rows": 3.0}))], {}, ["agent"]).metrics == {"rows": 3.0}


def test_without_one_of_the_rewards_there_is_none():
    scores = [ScoreRecord("verifier", Score(1.0)), ScoreRecord("style", Score(None))]
    assert combined(scores, {}, ["agent"]).reward is None


def test_agents_that_are_judged_apart_have_their_own_rewards_and_the_episode_their_mean():
    scores = [ScoreRecord("verifier", Score(None, agent_rewards={"white": 1.0, "black": 0.0}))]
    found = combined([*scores, ScoreRecord("style", Score(0.5), weight=2.0)], TURNS, BOTH)
    assert (found.reward, found.by_agent) == (1.5, {"white": 2.0, "black": 1.0})


def test_rewards_of_turns_go_to_the_agents_that_took_them():
    found = combined([ScoreRecord("verifier", Score(1.0, turn_rewards={0: 0.25, 1: -0.5, 2: 0.5}))], TURNS, BOTH)
    assert (found.reward, found.by_agent) == (1.125, {"white": 1.75, "black": 0.5})
    alone = combined([ScoreRecord("verifier", Score(1.0, turn_rewards={0: 0.25, 1: 0.5}))], {0: "agent"}, ["agent"])
    assert (alone.reward, alone.by_agent) == (1.75, {})


def test_a_policy_has_the_rewards_of_its_agents():
    episode = with_scores(game(), [ScoreRecord("verifier", Score(0.5, agent_rewards={"white": 1.0}))])
    assert (episode.rewards_of("a"), episode.rewards_of("b")) == ({"white": 1.0}, {"black": 0.5})
    assert with_scores(game(), [ScoreRecord("verifier", Score(0.25))]).rewards_of("b") == {"black": 0.25}
    assert game().rewards_of("a") == {}


def test_a_scorer_that_failed_fails_the_episode_if_it_counts():
    verdict = ScoreRecord("verifier", Score(1.0))
    failed = with_scores(game(), [verdict, ScoreRecord("style", None, 1.0, LATE)])
    assert (failed.failure, failed.stop_reason) == (LATE, None)
    told = with_scores(game(), [verdict, ScoreRecord("style", None, 0.0, LATE)])
    assert (told.failure, told.stop_reason, told.reward) == (None, StopReason.ANSWERED, 1.0)


def test_an_episode_that_failed_in_play_gets_no_reward_whatever_is_said_of_it():
    broken = replace(game(), failure=Failure(Boundary.ENVIRONMENT, "died", "gone"), stop_reason=None)
    judged = with_scores(broken, [ScoreRecord("verifier", Score(1.0))])
    assert (judged.reward, judged.failure.kind, len(judged.scores)) == (None, "died", 1)
