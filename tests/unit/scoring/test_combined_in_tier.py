"""Scores that are made of others, as a run has them made: on record, and only where every part was scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.config.base import parse_config
from agentrl.scorers.combined import CombinedConfig
from agentrl.scoring.tier import ScoringTier
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.testing.scorers import length_score
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Episode
from agentrl.types.errors import Boundary, EpisodeError, Failure
from agentrl.types.score import scored_turns, with_scores
from agentrl.types.turn_score import ScoredTurn, TurnScore
from tests.unit.scoring.scoring_parts import Line, a_tier, raises, says

# Contexts of 5 and 10 tokens, of which the scripted scorer says a thousandth; the verifier said 1.
EPISODE = with_scores(build_episode(build_ticket(), [(2, 0), (3, 0)]), [ScoreRecord("verifier", Score(1.0))])
LENGTHS, PRIORS = [0.005, 0.010], [0.003, 0.007]


def all_of(name: str = "all", **options: Any) -> CombinedConfig:
    return parse_config(CombinedConfig, {"kind": "combined", "name": name, **options}, "scorer")


async def judged_by(tier: ScoringTier, line: Line) -> Episode:
    async with line.running():
        judged = await tier.complete(EPISODE, is_required=True)
        return await tier.complete(judged, is_required=False)


@pytest.mark.parametrize("required", [("len",), ("len", "all")])
async def test_parts_of_turns_and_of_the_episode_make_one_score_that_is_on_record(required: Sequence[str]) -> None:
    line = Line()
    config = all_of(parts={"len": 10.0, "verifier": 0.5}, weight=0.1 if "all" in required else 0.0)
    tier, notes = a_tier(line, required=required, combined=[config])
    judged = await judged_by(tier, line)
    values = [10.0 * length + 0.5 for length in LENGTHS]
    assert [score.value for score in judged.turn_scores["all"]] == pytest.approx(values)
    assert [score.prior for score in judged.turn_scores["all"]] == pytest.approx([10 * prior + 0.5 for prior in PRIORS])
    assert [score.key for score in judged.turn_scores["all"]] == [turn.key for turn in scored_turns(EPISODE)]
    assert [(name, score.value) for name, score in notes.turns if name == "all"] == [
        ("all", pytest.approx(value)) for value in values
    ]
    record = next(record for record in notes.records if record.scorer == "all")
    assert record.score == Score(pytest.approx(sum(values) / 2), {"turns": 2.0})
    assert judged.reward == pytest.approx(1.0 + config.weight * sum(values) / 2)


async def test_a_score_is_made_of_one_that_is_made_itself() -> None:
    line = Line()
    first, second = all_of("first", parts={"len": 2.0}), all_of("second", parts={"first": 3.0})
    tier, _ = a_tier(line, combined=[first, second])
    judged = await judged_by(tier, line)
    assert [score.value for score in judged.turn_scores["second"]] == pytest.approx([6 * length for length in LENGTHS])


async def half(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
    """Judges the opening, and fails at what follows."""
    failure = Failure(Boundary.SCORER, "prose", "no number in it")
    return [
        TurnScore(turn.key, "slow", failure=failure) if turn.key.turn else length_score(turn, "slow") for turn in turns
    ]


@pytest.mark.parametrize("part", [half, raises(EpisodeError(Boundary.SCORER, "died", "signal 9"))])
@pytest.mark.parametrize("weight", [0.0, 0.5])
async def test_a_part_that_failed_fails_the_whole_and_makes_no_zero(part: Any, weight: float) -> None:
    line = Line(part)
    tier, notes = a_tier(line, combined=[all_of(parts={"len": 1.0, "verifier": 1.0}, weight=weight)])
    judged = await judged_by(tier, line)
    record = next(record for record in notes.records if record.scorer == "all")
    assert (record.score, record.weight) == (None, 0.0)
    assert record.failure is not None
    assert (record.failure.boundary, record.failure.kind) == (Boundary.SCORER, "parts")
    assert "all" in record.failure.message
    assert not judged.turn_scores.get("all")
    assert [score for name, score in notes.turns if name == "all"] == []
    assert judged.reward == 1.0, "by its outcome alone"
    assert [name for name in judged.metrics if name.startswith("all/")] == []


async def test_parts_without_a_value_in_common_fail_the_whole() -> None:
    async def priors(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        return [TurnScore(turn.key, "slow", prior=0.5) for turn in turns]

    line = Line(priors)
    tier, notes = a_tier(line, combined=[all_of(parts={"verifier": 1.0}, gates=[{"scorer": "len", "at_least": 0.1}])])
    judged = await judged_by(tier, line)
    record = next(record for record in notes.records if record.scorer == "all")
    assert record.failure is not None
    assert "['len'] give no value" in record.failure.message
    assert not judged.turn_scores["all"]


async def test_what_has_its_record_is_not_made_again() -> None:
    line = Line(says("slow"))
    tier, notes = a_tier(line, required=("len", "all"), combined=[all_of(parts={"len": 1.0})])
    async with line.running():
        judged = await tier.complete(EPISODE, is_required=True)
        assert await tier.complete(judged, is_required=True) is judged
    assert sorted(record.scorer for record in notes.records) == ["all", "len"]
