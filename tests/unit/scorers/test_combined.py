"""Scores made of other scores: numbers worked by hand, and what holds for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.base import parse_config
from agentrl.scorers.combined import CombinedConfig, combine, in_order
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Agent, Episode
from agentrl.types.errors import Boundary, ConfigError, Failure
from agentrl.types.score import scored_turns
from agentrl.types.turn_score import TurnScore, check_turn_score

Numbers = tuple[float | None, ...]
PLAYED = build_episode(build_ticket(), [(2, 0), (3, 0)])
KEYS = [turn.key for turn in scored_turns(PLAYED)]
NUMBER = st.floats(-100, 100)


def config_of(name: str = "all", **fields: Any) -> CombinedConfig:
    return parse_config(CombinedConfig, {"kind": "combined", "name": name, **fields}, "scorer")


def scores_of(values: Numbers, priors: Numbers = (None, None), version: str = "1") -> tuple[TurnScore, ...]:
    return tuple(TurnScore(key, version, *both) for key, *both in zip(KEYS, values, priors, strict=True))


def episode_of(verifier: Score | None = None, **parts: tuple[TurnScore, ...]) -> Episode:
    return replace(PLAYED, scores=(ScoreRecord("verifier", verifier or Score(1.0)),), turn_scores=parts)


def made(config: CombinedConfig, episode: Episode) -> list[tuple[float | None, float | None]]:
    """Value and prior of each turn."""
    scores = combine(config, episode)
    assert scores is not None
    assert [check_turn_score(turn, score) for turn, score in zip(scored_turns(episode), scores, strict=True)]
    return [(score.value, score.prior) for score in scores]


def test_values_are_weighed_and_so_are_priors():
    config = config_of(parts={"prm": 0.5, "style": 0.25})
    parts = {"prm": scores_of((0.8, 0.4), (0.6, 0.2)), "style": scores_of((0.4, 1.0), (0.0, -1.0))}
    # .5 * .8 + .25 * .4 and .5 * .6 + .25 * 0; .5 * .4 + .25 * 1 and .5 * .2 - .25.
    assert made(config, episode_of(**parts)) == [
        (pytest.approx(0.5), pytest.approx(0.3)),
        (pytest.approx(0.45), pytest.approx(-0.15)),
    ]
    halves = config_of(parts={"prm": 0.5, "style": 0.25}, normalise=True)  # by .75
    assert made(halves, episode_of(**parts))[0] == (pytest.approx(2 / 3), pytest.approx(0.4))


def test_a_scorer_of_whole_episodes_says_its_reward_of_each_turn():
    config = config_of(parts={"prm": 1.0, "verifier": -0.5})
    parts = {"prm": scores_of((0.8, 0.4), (0.6, None))}
    found = made(config, episode_of(Score(0.2), **parts))
    assert found == [(pytest.approx(0.7), pytest.approx(0.5)), (pytest.approx(0.3), None)]


def test_an_agent_that_is_judged_apart_has_its_own_reward():
    config = config_of(parts={"verifier": 1.0})
    episode = episode_of(Score(0.5, agent_rewards={"agent": 0.25, "partner": 0.75}))
    assert made(config, episode) == [(0.25, 0.25)] * 2
    of_others = replace(episode, agents=(Agent("agent", "main"),), scores=(ScoreRecord("verifier", Score(0.5)),))
    assert made(config, of_others) == [(0.5, 0.5)] * 2


@pytest.mark.parametrize(("reward", "expected"), [(1.0, [0.8, 0.4]), (0.99, [0.0, 0.0])])
def test_turns_count_only_where_the_verifier_lets_them(reward: float, expected: list[float]):
    config = config_of(parts={"prm": 1.0}, gates=[{"scorer": "verifier", "at_least": 1.0}])
    found = made(config, episode_of(Score(reward), prm=scores_of((0.8, 0.4))))
    assert [value for value, _ in found] == expected


def test_a_gate_of_turns_is_each_turn_s_own():
    config = config_of(parts={"prm": 1.0}, gates=[{"scorer": "style", "at_least": 0.5}])
    parts = {"prm": scores_of((0.8, 0.4), (0.7, 0.3)), "style": scores_of((0.49, 0.5))}
    assert made(config, episode_of(**parts)) == [(0.0, 0.0), (0.4, 0.3)]
    scores = combine(config, episode_of(**parts))
    assert scores is not None
    assert [score.note for score in scores] == ["gate of style closed", "1 prm 0.4"]


def test_what_is_beyond_the_clip_becomes_its_bound():
    config = config_of(parts={"prm": 2.0}, clip=[-1, 1])
    assert made(config, episode_of(prm=scores_of((0.8, -0.4), (0.1, -0.9)))) == [(1.0, 0.2), (-0.8, -1.0)]


def test_a_part_that_is_missing_or_has_failed_makes_no_score_at_all():
    config = config_of(parts={"prm": 1.0, "style": 0.0}, gates=[{"scorer": "verifier", "at_least": 0.0}])
    whole = {"prm": scores_of((0.8, 0.4)), "style": scores_of((0.0, 0.0))}
    failed = replace(whole["prm"][1], value=None, failure=Failure(Boundary.SCORER, "prose", "Sure!"))
    assert combine(config, episode_of(**whole)) is not None
    lacking = [
        episode_of(prm=whole["prm"]),
        episode_of(**whole | {"prm": whole["prm"][:1]}),
        episode_of(**whole | {"prm": (whole["prm"][0], failed)}),
        episode_of(Score(None), **whole),
        replace(episode_of(**whole), scores=()),
        replace(episode_of(**whole), scores=(ScoreRecord("verifier", None, failure=failed.failure),)),
    ]
    assert [combine(config, episode) for episode in lacking] == [None] * len(lacking)


def test_a_score_of_another_turn_s_tokens_is_none_of_this_one():
    key = replace(KEYS[1], digest="of other tokens")
    scores = scores_of((0.8, 0.4))
    assert combine(config_of(parts={"prm": 1.0}), episode_of(prm=(scores[0], replace(scores[1], key=key)))) is None


def test_parts_without_a_number_in_common_are_a_failure_that_names_them():
    parts = {"prm": scores_of((0.8, None), (None, 0.5)), "style": scores_of((None, None), (0.5, 0.5))}
    scores = combine(config_of(parts={"prm": 1.0, "style": 1.0}), episode_of(**parts))
    assert scores is not None
    assert scores[0].failure is not None
    assert scores[0].failure.kind == "parts"
    assert "prm" in scores[0].failure.message
    assert (scores[0].value, scores[0].prior) == (None, None)
    assert (scores[1].value, scores[1].prior) == (None, 1.0)


def test_a_version_is_of_the_rule_and_of_the_versions_of_its_parts():
    def version(weight: float, part: str) -> str:
        scores = combine(config_of(parts={"prm": weight}), episode_of(prm=scores_of((0.8, 0.4), version=part)))
        assert scores is not None
        return scores[0].version

    assert version(1.0, "1") == version(1.0, "1")
    assert len({version(1.0, "1"), version(1.0, "2"), version(2.0, "1")}) == 3


def test_turns_of_other_policies_are_left_out():
    episode = episode_of(prm=scores_of((0.8, 0.4)))
    assert made_of(config_of(parts={"prm": 1.0}, policies=["main"]), episode) == 2
    assert made_of(config_of(parts={"prm": 1.0}, policies=["other"]), episode) == 0


def made_of(config: CombinedConfig, episode: Episode) -> int:
    scores = combine(config, episode)
    assert scores is not None
    return len(scores)


def test_scores_may_be_made_of_scores_that_are_made():
    outer = config_of("outer", parts={"inner": 1.0, "prm": 1.0}, gates=[{"scorer": "inner", "at_least": 0}])
    inner = config_of("inner", parts={"prm": 0.5})
    assert [config.name for config in in_order([outer, inner])] == ["inner", "outer"]
    episode = episode_of(prm=scores_of((0.8, 0.4)))
    for config in in_order([outer, inner]):
        scores = combine(config, episode)
        assert scores is not None
        episode = replace(episode, turn_scores={**episode.turn_scores, config.name: scores})
    assert [score.value for score in episode.turn_scores["outer"]] == pytest.approx([1.2, 0.6])


def test_a_circle_is_named_whole():
    first = config_of("first", parts={"second": 1.0})
    second = config_of("second", parts={"prm": 1.0}, gates=[{"scorer": "first", "at_least": 0}])
    with pytest.raises(
        ConfigError, match=r"made of one another: (first -> second -> first|second -> first -> second);"
    ):
        in_order([first, second])


@given(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, st.lists(NUMBER, min_size=2, max_size=2, unique=True).map(sorted))
def test_a_clipped_value_lies_in_its_bounds_and_a_gate_changes_all_or_nothing(
    prm: float, style: float, reward: float, at_least: float, weight: float, clip: list[float]
):
    parts = {"prm": weight, "style": 1.0}
    episode = episode_of(Score(reward), prm=scores_of((prm, prm)), style=scores_of((style, style)))
    gates = [{"scorer": "verifier", "at_least": at_least}]
    bare = made(config_of(parts=parts), episode)
    gated = made(config_of(parts=parts, gates=gates), episode)
    clipped = made(config_of(parts=parts, gates=gates, clip=clip), episode)
    assert bare[0][0] == pytest.approx(weight * prm + style)
    assert gated == (bare if reward >= at_least else [(0.0, None)] * 2)
    for (before, _), (after, _) in zip(gated, clipped, strict=True):
        assert before is not None
        assert after is not None
        assert clip[0] <= after <= clip[1]
        assert after == before or (after == clip[0] and before < after) or (after == clip[1] and before > after)
