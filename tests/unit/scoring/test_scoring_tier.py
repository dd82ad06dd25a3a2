"""What becomes of an episode by its scorers of turns: all judged, late, failed, known from an earlier start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentrl.scoring import tier as tier_module
from agentrl.scoring.feed import TurnFeed
from agentrl.scoring.tier import ScoringTier
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.testing.scorers import length_score
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Episode, Node
from agentrl.types.errors import AgentRLError, Boundary, EpisodeError, Failure, StalledError
from agentrl.types.rollout import TurnPlayed
from agentrl.types.score import scored_turns, with_scores
from agentrl.types.turn_score import ScoredTurn, TurnScore
from tests.unit.scoring.scoring_parts import Gate, Line, a_tier, hangs, raises, says, until

TURNS = [(2, 0), (3, 0), (4, 0)]


def an_episode(name: str = "train-000000-0", reward: float = 1.0) -> Episode:
    """Three turns, judged by the verifier."""
    return with_scores(build_episode(build_ticket(name), TURNS), [ScoreRecord("verifier", Score(reward))])


def events(episode: Episode) -> list[TurnPlayed]:
    """What a worker tells of its turns."""
    found = []
    for turn in episode.turns:
        nodes = tuple(replace(node, sample=None) for node in episode.nodes if node.turn == turn.index)
        found.append(TurnPlayed(episode.episode_id, 1, turn.index, nodes))
    return found


def play(tier: ScoringTier, episode: Episode) -> None:
    for event in events(episode):
        tier.played(episode.ticket, event)


def lengths(episode: Episode) -> list[float]:
    """What the scripted scorer says of each turn, by the lengths that the episode was built with."""
    return [0.005, 0.010, 0.016]


async def settle(tier: ScoringTier, episode: Episode) -> Episode:
    """As a run does, at the end of play."""
    judged = await tier.complete(episode, is_required=True)
    judged = await tier.complete(judged, is_required=False)
    tier.forget(episode.episode_id)
    return judged


async def test_turns_are_judged_while_their_episode_is_played() -> None:
    line = Line()
    tier, notes = a_tier(line)
    episode = an_episode()
    async with line.running():
        play(tier, episode)
        await until(lambda: line.total("scored") == 3)
        judged = await settle(tier, episode)
    assert [score.value for score in judged.turn_scores["len"]] == lengths(episode)
    assert [score.key for score in judged.turn_scores["len"]] == [turn.key for turn in scored_turns(episode)]
    assert sum(map(len, line.batches)) == 3, "nobody is asked again at the end"
    [record] = notes.records
    assert record == ScoreRecord("len", Score(pytest.approx(sum(lengths(episode)) / 3), {"turns": 3.0}), 0.0)
    assert (judged.reward, judged.metrics["len/turns"]) == (1.0, 3.0)


async def test_a_turn_whose_score_is_not_kept_for_others_is_not_asked_about_again_at_the_end() -> None:
    """Each answer is of a new version of the scorer, so that nothing stays in the cache."""
    line = Line(says("v1"), says("v2"), says("v3"), says("v4"), batch_turns=1)
    tier, _ = a_tier(line)
    async with line.running():
        play(tier, an_episode())
        await until(lambda: line.total("scored") == 3)
        judged = await settle(tier, an_episode())
    assert line.batches == [[0], [1], [2]]
    assert [score.version for score in judged.turn_scores["len"]] == ["v1", "v2", "v3"]


async def test_a_weight_brings_the_mean_of_its_values_into_the_reward() -> None:
    line = Line(weight=0.5)
    tier, _ = a_tier(line)
    async with line.running():
        judged = await settle(tier, an_episode())
    assert judged.reward == pytest.approx(1.0 + 0.5 * sum(lengths(judged)) / 3)


@pytest.mark.parametrize(("late", "weight", "failed"), [("outcome_only", 0.0, False), ("drop", 1.0, True)])
async def test_a_late_scorer_leaves_the_outcome_or_drops_the_episode(late: str, weight: float, failed: bool) -> None:
    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        return await (hangs(turns) if turns[0].key.turn == 1 else says("slow")(turns))

    line = Line(answer, late=late, deadline_s=0.2, batch_turns=1, concurrency=2)
    tier, notes = a_tier(line)
    async with line.running():
        play(tier, an_episode())
        await until(lambda: line.total("scored") == 2)
        judged = await settle(tier, an_episode())
        assert line.queue.num_waiting == 0
    assert [score.key.turn for score in judged.turn_scores["len"]] == [0, 2]
    assert (judged.failure is not None, judged.reward) == (failed, 1.0)
    [record] = notes.records
    assert (record.score, record.weight, record.failure.boundary) == (None, weight, Boundary.TIMEOUT)
    assert "1 of 3 turns" in record.failure.message
    assert line.total("deadline_misses") == 1


@pytest.mark.parametrize("late", ["outcome_only", "drop"])
async def test_the_record_says_why_a_scorer_failed(late: str) -> None:
    line = Line(raises(EpisodeError(Boundary.SCORER, "died", "signal 9")), late=late)
    tier, notes = a_tier(line)
    async with line.running():
        judged = await settle(tier, an_episode())
    assert notes.records[0].failure == Failure(Boundary.SCORER, "died", "signal 9")
    assert judged.turn_scores == {}
    assert "len/reward" not in judged.metrics, "no zero is made of it"


async def test_who_waits_gets_the_scores_of_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_ASK_AGAIN_S", 0.01)
    line = Line(raises(ValueError("no verdict")), says("slow"), late="wait")
    tier, notes = a_tier(line)
    async with line.running():
        judged = await settle(tier, an_episode())
    assert [score.value for score in judged.turn_scores["len"]] == lengths(judged)
    assert (line.total("asked_again"), notes.records[0].failure) == (3, None)


async def test_patience_has_an_end_that_names_the_scorer_and_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_ASK_AGAIN_S", 0.01)
    line = Line(raises(ValueError("no verdict")), late="wait", patience_s=0.2)
    tier, notes = a_tier(line)
    async with line.running():
        with pytest.raises(StalledError, match=r"scorer 'len' has not judged 3 turns .* no verdict.*resume"):
            await settle(tier, an_episode())
    assert notes.records == []


async def test_a_scorer_that_only_records_holds_up_no_step() -> None:
    gate = Gate()
    line = Line(gate)
    tier, notes = a_tier(line, required=())
    async with line.running():
        play(tier, an_episode())
        judged = await tier.complete(an_episode(), is_required=True)
        assert (judged.turn_scores, notes.records) == ({}, [])
        gate.may_end.set()
        judged = await tier.complete(judged, is_required=False)
    assert len(judged.turn_scores["len"]) == 3


async def test_a_failed_episode_needs_no_scores_and_its_turns_leave_the_line() -> None:
    line = Line()
    tier, _ = a_tier(line)
    play(tier, an_episode())
    assert line.queue.num_waiting == 3
    failed = replace(an_episode(), failure=Failure(Boundary.ENVIRONMENT, "reset", "gone"))
    assert await settle(tier, failed) is failed
    assert line.queue.num_waiting == 0


async def test_what_is_on_record_is_not_asked_about() -> None:
    turns = list(scored_turns(an_episode()))
    line = Line()
    tier, _ = a_tier(line, known={"train-000000-0": {"len": {turns[0].key: length_score(turns[0], "old")}}})
    episode = replace(an_episode(), turn_scores={"len": (length_score(turns[1], "older"),)})
    async with line.running():
        tier.played(episode.ticket, events(episode)[0])
        judged = await settle(tier, episode)
    assert line.batches == [[2]]
    assert [score.version for score in judged.turn_scores["len"]] == ["old", "older", "slow"]


async def test_a_turn_that_was_lost_with_its_worker_is_neither_waited_for_nor_joined() -> None:
    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        return await (hangs(turns) if len(turns[0].token_ids) == 8 else says("slow")(turns))

    line = Line(answer, batch_turns=1, concurrency=2)
    tier, _ = a_tier(line)
    lost = with_scores(build_episode(build_ticket(), [(5, 0)]), [])
    async with line.running():
        tier.played(lost.ticket, events(lost)[0])
        judged = await settle(tier, an_episode())
    assert [score.value for score in judged.turn_scores["len"]] == lengths(judged)


async def test_policies_of_others_are_not_judged() -> None:
    line = Line(policies=("opponent",))
    tier, notes = a_tier(line)
    async with line.running():
        play(tier, an_episode())
        await settle(tier, an_episode())
    assert (line.batches, notes.records[0].score) == ([], Score(None, {"turns": 0.0}))


async def test_nothing_of_an_episode_that_is_over_is_held() -> None:
    line = Line()
    tier, _ = a_tier(line)
    async with line.running() as queue:
        for number in range(20):
            episode = an_episode(f"train-{number:06d}-0")
            play(tier, episode)
            await settle(tier, episode)
        assert (queue.num_waiting, len(queue._in_flight)) == (0, 0)
    assert (tier._asked, tier._known, tier._feed._nodes) == ({}, {}, {})


async def test_an_alarm_stops_the_run() -> None:
    line = Line(divergence={"action": "stop", "episodes": 16})
    tier, _ = a_tier(line)
    async with line.running():
        for number in range(15):
            await settle(tier, parting_episode(number))
        with pytest.raises(AgentRLError, match="learns to please the scorer"):
            await settle(tier, parting_episode(15))


def parting_episode(number: int) -> Episode:
    """The scripted scorer likes long contexts; from the eighth on they are long, and the outcome falls with that."""
    size, reward = (2, 1.0) if number < 8 else (40, 0.0)
    episode = build_episode(build_ticket(f"train-{number:06d}-0"), [(size + number % 2, 0)])
    return with_scores(episode, [ScoreRecord("verifier", Score(reward + 0.01 * (number % 3)))])


async def test_a_tier_that_cannot_open_leaves_no_worker_behind() -> None:
    closed: list[str] = []

    async def broken() -> None:  # type: ignore[return]
        raise EpisodeError(Boundary.SCORER, "len", "no model")

    good, bad = Line(name="good"), Line(name="bad", start=broken)  # type: ignore[arg-type]

    async def close() -> None:
        closed.append("good")

    good.scorer.close = close  # type: ignore[method-assign]
    tier, _ = a_tier(good, bad)
    with pytest.raises(EpisodeError, match="no model"):
        await tier.open()
    assert closed == ["good"]


def test_a_branch_is_seen_with_its_own_context() -> None:
    feed = TurnFeed(lambda environment, agent: "main")
    ticket = build_ticket()
    root, first = Node(0, None, "agent", 0, np.arange(3)), Node(1, 0, "agent", 0, np.arange(10, 12))
    fork, second = Node(2, 0, "agent", 1, np.arange(20, 21)), Node(3, 2, "agent", 1, np.arange(30, 34))
    one = feed.add(ticket, TurnPlayed(ticket.episode_id, 1, 0, (root, first)))
    other = feed.add(ticket, TurnPlayed(ticket.episode_id, 1, 1, (fork, second)))
    assert one is not None
    assert other is not None
    assert (one.token_ids.tolist(), one.reply_start) == ([0, 1, 2, 10, 11], 3)
    assert (other.token_ids.tolist(), other.reply_start) == ([0, 1, 2, 20, 30, 31, 32, 33], 4)


def test_a_turn_behind_an_unknown_one_is_left_to_the_end() -> None:
    feed = TurnFeed(lambda environment, agent: "main")
    ticket, node = build_ticket(), Node(3, 2, "agent", 1, np.arange(4))
    assert feed.add(ticket, TurnPlayed(ticket.episode_id, 1, 1, (node,))) is None
    assert feed.add(ticket, TurnPlayed(ticket.episode_id, 1, 2)) is None


def test_the_feed_says_of_a_turn_what_the_record_says_of_it() -> None:
    episode, feed = an_episode(), TurnFeed(lambda environment, agent: "main")
    fed = [feed.add(episode.ticket, event) for event in events(episode)]
    for given, recorded in zip(fed, scored_turns(episode), strict=True):
        assert given is not None
        assert (given.key, given.policy, given.reply_start, given.environment) == (
            recorded.key, recorded.policy, recorded.reply_start, recorded.environment,
        )  # fmt: skip
        assert given.token_ids.tolist() == recorded.token_ids.tolist()
