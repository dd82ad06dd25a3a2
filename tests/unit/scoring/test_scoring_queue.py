"""The line of a scorer: what is asked, when, how often, and what an answer means."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentrl.scoring import queue as queue_module
from agentrl.scoring.queue import UNREACHABLE
from agentrl.testing.scorers import length_score
from agentrl.types.errors import Boundary, EngineError, EpisodeError, StorageError
from agentrl.types.turn_score import ScoredTurn, TurnScore
from tests.unit.scoring.scoring_parts import Gate, Line, a_turn, hangs, raises, says, until


async def test_turns_that_wait_together_go_in_batches_in_their_order() -> None:
    line = Line(batch_turns=3)
    asked = [line.queue.ask(a_turn(number)) for number in range(7)]
    async with line.running():
        scores = await asyncio.gather(*asked)
    assert line.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert [score.value for score in scores] == [0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01]
    assert [score.prior for score in scores] == [0.002] * 7
    assert [(name, score.key.turn) for name, score in line.kept] == [("len", number) for number in range(7)]


async def test_a_turn_that_is_asked_about_twice_is_sent_once() -> None:
    gate = Gate()
    line = Line(gate)
    async with line.running() as queue:
        first = queue.ask(a_turn(0))
        assert queue.ask(a_turn(0)) is first, "it waits"
        await gate.has_begun.wait()
        assert queue.ask(a_turn(0)) is first, "it is in flight"
        gate.may_end.set()
        await first
    assert line.batches == [[0]]


async def test_a_score_is_on_record_before_anybody_hears_of_it() -> None:
    line = Line()
    may_keep = asyncio.Event()

    async def keep(name: str, scores: Sequence[TurnScore]) -> None:
        line.kept += [(name, score) for score in scores]
        await may_keep.wait()

    line.queue._keep = keep
    async with line.running() as queue:
        asked = queue.ask(a_turn(0))
        await until(lambda: bool(line.kept))
        assert not asked.done()
        may_keep.set()
        assert (await asked).value == 0.004


async def test_equal_contexts_are_asked_about_once_and_each_is_on_record() -> None:
    line = Line()
    async with line.running() as queue:
        first = await queue.ask(a_turn(0, "one"))
        second = await queue.ask(a_turn(0, "two"))
    assert (second.value, second.key.episode_id) == (first.value, "two")
    assert len(line.scorer.batches) == 1
    assert [score.key.episode_id for _, score in line.kept] == ["one", "two"]
    assert line.total("cached") == 1


async def test_a_new_version_of_the_scorer_answers_anew() -> None:
    line = Line(says("v1"), says("v2"))
    async with line.running() as queue:
        assert (await queue.ask(a_turn(0, "one"))).version == "v1"
        assert (await queue.ask(a_turn(1, "one"))).version == "v2"
        assert (await queue.ask(a_turn(0, "two"))).version == "v2", "what v1 said is not kept"
    assert line.total("versions") == 2


async def test_an_answer_from_before_a_change_of_version_is_not_kept_for_others() -> None:
    old = Gate("v1")
    line = Line(says("v1"), old, says("v2"), concurrency=2)
    async with line.running() as queue:
        await queue.ask(a_turn(9))
        late = queue.ask(a_turn(0, "one"))
        await old.has_begun.wait()
        assert (await queue.ask(a_turn(1, "one"))).version == "v2"
        old.may_end.set()
        assert (await late).version == "v1"
        assert (await queue.ask(a_turn(0, "two"))).version == "v2"
    assert line.queue.counts.version == "v2"


async def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "_CACHED", 2)
    line = Line()
    async with line.running() as queue:
        for number in range(5):
            await queue.ask(a_turn(number))
        await queue.ask(a_turn(4, "two"))
        await queue.ask(a_turn(0, "two"))
    assert len(queue._cache) == 2
    assert line.batches[5:] == [[0]]


async def test_turns_that_nobody_needs_leave_the_line() -> None:
    gate = Gate()
    line = Line(gate, says("slow"), batch_turns=1)
    async with line.running() as queue:
        asked = [queue.ask(a_turn(number)) for number in range(3)]
        await gate.has_begun.wait()
        assert queue.forget([a_turn(0).key, a_turn(1).key]) == 1
        gate.may_end.set()
        assert (await asked[2]).value == 0.006
    assert [future.cancelled() for future in asked] == [True, True, False]
    assert line.batches == [[0], [2]]


async def test_a_turn_that_was_forgotten_in_flight_may_be_asked_about_again() -> None:
    gate = Gate()
    line = Line(gate)
    async with line.running() as queue:
        queue.ask(a_turn(0))
        await gate.has_begun.wait()
        queue.forget([a_turn(0).key])
        again = queue.ask(a_turn(0))
        gate.may_end.set()
        assert (await again).value == 0.004
    assert line.batches == [[0]]


async def test_there_is_no_room_while_too_many_wait() -> None:
    gate = Gate()
    line = Line(gate, batch_turns=1, pool={"max_waiting": 2})
    async with line.running() as queue:
        asked = [queue.ask(a_turn(0))]
        await gate.has_begun.wait()
        asked += [queue.ask(a_turn(number)) for number in (1, 2)]
        room = asyncio.create_task(queue.room())
        await asyncio.sleep(0)
        assert not room.done()
        queue.forget([a_turn(2).key])
        await room
        gate.may_end.set()
        await asyncio.gather(*asked[:2])


async def test_turns_that_were_never_sent_are_sent_again_after_a_pause() -> None:
    away = raises(EpisodeError(Boundary.SCORER, UNREACHABLE, "connection refused"))
    line = Line(away, away, says("slow"), batch_turns=2)
    asked = [line.queue.ask(a_turn(number)) for number in range(3)]
    async with line.running():
        scores = await asyncio.gather(*asked)
    assert [score.failure for score in scores] == [None] * 3
    assert line.batches == [[0, 1], [0, 1], [0, 1], [2]], "in their order"
    assert line.total("not_sent") == 4


async def test_turns_that_were_forgotten_while_the_scorer_was_away_do_not_come_back() -> None:
    begun, may_fail = asyncio.Event(), asyncio.Event()

    async def away(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        begun.set()
        await may_fail.wait()
        raise EpisodeError(Boundary.SCORER, UNREACHABLE, "connection refused")

    line = Line(away, says("slow"))
    async with line.running() as queue:
        queue.ask(a_turn(0))
        await begun.wait()
        queue.forget([a_turn(0).key])
        may_fail.set()
        await until(lambda: line.total("not_sent") == 1)
        assert (queue.num_waiting, len(queue._in_flight)) == (0, 0)


@pytest.mark.parametrize(
    ("error", "boundary", "kind"),
    [
        (EpisodeError(Boundary.ENGINE, "timeout", "late"), Boundary.ENGINE, "timeout"),
        (ValueError("no verdict"), Boundary.SCORER, "len"),
        (EngineError("no engine is left"), Boundary.SCORER, "len"),
    ],
)
async def test_a_batch_that_fails_is_not_sent_again(error: Exception, boundary: Boundary, kind: str) -> None:
    line = Line(raises(error), says("slow"))
    asked = [line.queue.ask(a_turn(number)) for number in range(2)]
    async with line.running():
        scores = await asyncio.gather(*asked)
    assert [(s.value, s.failure and (s.failure.boundary, s.failure.kind)) for s in scores] == [
        (None, (boundary, kind)),
        (None, (boundary, kind)),
    ]
    assert (len(line.scorer.batches), line.kept, line.total("failed")) == (1, [], 2)


async def test_a_batch_that_takes_too_long_fails_and_the_line_goes_on() -> None:
    line = Line(hangs, says("slow"), call_s=0.05, batch_turns=1)
    asked = [line.queue.ask(a_turn(number)) for number in range(2)]
    async with line.running():
        hung, good = await asyncio.gather(*asked)
    assert hung.failure is not None
    assert (hung.failure.boundary, hung.failure.kind) == (Boundary.TIMEOUT, "scorer.len")
    assert good.value == 0.005


async def test_a_record_that_cannot_be_written_ends_the_run() -> None:
    line = Line()

    async def keep(name: str, scores: Sequence[TurnScore]) -> None:
        raise StorageError("disk full")

    line.queue._keep = keep
    await line.queue.open()
    line.queue.ask(a_turn(0))
    with pytest.raises(ExceptionGroup, match="unhandled") as group:
        await line.queue.run()
    assert isinstance(group.value.exceptions[0], StorageError)


def other(score: TurnScore) -> TurnScore:
    return replace(score, key=a_turn(77).key)


WRONG = {
    "nan": (lambda score: replace(score, value=float("nan")), "value"),
    "infinite prior": (lambda score: replace(score, prior=float("inf")), "value"),
    "text": (lambda score: replace(score, value="good"), "value"),
    "nothing": (lambda score: TurnScore(score.key, "slow"), "value"),
    "no version": (lambda score: replace(score, version=None), "value"),
    "too few": (lambda score: replace(score, logprobs=np.zeros(1, np.float32)), "shape"),
    "wrong dimensions": (lambda score: replace(score, logprobs=np.zeros((2, 1), np.float32)), "shape"),
    "nan log-probability": (lambda score: replace(score, logprobs=np.full(2, np.nan, np.float32)), "value"),
    "of another turn": (other, "missing"),
    "of another context": (lambda score: replace(score, key=replace(score.key, digest="0" * 24)), "missing"),
    "absent": (lambda score: None, "missing"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_answer_fails_its_turn_and_no_other(name: str) -> None:
    change, kind = WRONG[name]

    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        first, second = map(length_score, turns)
        changed = change(first)
        return [second] if changed is None else [changed, second]

    line = Line(answer)
    asked = [line.queue.ask(a_turn(number)) for number in range(2)]
    async with line.running():
        wrong, right = await asyncio.gather(*asked)
    assert (wrong.key, wrong.value, wrong.failure and wrong.failure.kind) == (a_turn(0).key, None, kind)
    assert (right.value, right.failure) == (0.005, None)
    assert [score.key.turn for _, score in line.kept] == [1]


async def test_answers_in_another_order_twice_or_unasked_join_their_own_turns() -> None:
    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        own = [length_score(turn) for turn in turns]
        return [length_score(a_turn(50)), *reversed(own), replace(own[0], value=-1.0)]

    line = Line(answer)
    asked = [line.queue.ask(a_turn(number)) for number in range(3)]
    async with line.running():
        scores = await asyncio.gather(*asked)
    assert [score.value for score in scores] == [0.004, 0.005, 0.006]
    assert (line.total("stray"), line.total("repeated")) == (1, 1)


async def test_a_batch_of_several_versions_fails_as_a_whole() -> None:
    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        return [length_score(turns[0], "v1"), length_score(turns[1], "v2")]

    line = Line(answer)
    asked = [line.queue.ask(a_turn(number)) for number in range(2)]
    async with line.running():
        scores = await asyncio.gather(*asked)
    assert [score.failure and score.failure.kind for score in scores] == ["version", "version"]
    assert (line.total("mixed"), line.kept) == (2, [])


@pytest.mark.parametrize("answers", [None, 3, [None], ["good"], [object()]])
async def test_answers_that_are_no_scores_fail_their_batch_and_not_the_run(answers: object) -> None:
    async def answer(turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        return answers  # type: ignore[return-value]

    line = Line(answer, says("slow"))
    async with line.running() as queue:
        wrong = await queue.ask(a_turn(0))
        assert wrong.failure is not None
        assert wrong.failure.boundary is Boundary.SCORER
        assert (await queue.ask(a_turn(1))).value == 0.005
