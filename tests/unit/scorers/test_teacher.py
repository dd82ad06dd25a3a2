"""A teacher's engines: which are asked, what is said where none serves, and what no teacher can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_stub import EngineStub, running

from agentrl.inference.fleet import Fleet
from agentrl.scorers import teacher
from agentrl.scorers.definition import ScorerSetting, ServedPolicy
from agentrl.scorers.teacher import TeacherConfig, TeacherScorer
from agentrl.scoring.queue import ScorerQueue
from agentrl.scoring.workers import LoopWorker
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.types.errors import Boundary, ConfigError, EngineError, EpisodeError
from agentrl.types.turn_score import TurnScore, check_turn_score
from agentrl.types.version import PolicyVersion
from tests.unit.scoring.scoring_parts import GENEROUS_S, a_turn, until

FIRST = PolicyVersion(0, 0)


class Scoring:
    """An engine that only scores: each token is worth minus its own id."""

    def __init__(self, name: str, on_score: Callable[[], None] = lambda: None) -> None:
        self.name, self.asked, self._on_score = name, list[int](), on_score

    async def score(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        self.asked.append(start)
        self._on_score()
        return [-float(token) for token in token_ids[start:]]


def fleet_of(*engines: Scoring) -> Fleet:
    return Fleet(engines, FIRST)  # type: ignore[arg-type]


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "other", shape=TINY_SHAPE.model_copy(update={"vocabulary_tokens": 300}))


async def test_the_replys_tokens_alone_are_scored_in_turn_by_all_engines() -> None:
    one, two = Scoring("one"), Scoring("two")
    scorer = TeacherScorer("big", fleet_of(one, two))
    turns = [a_turn(number) for number in range(4)]
    for turn, score in zip(turns, await scorer.score(turns), strict=True):
        assert check_turn_score(turn, score).logprobs.tolist() == [-float(token) for token in turn.token_ids[2:]]
        assert (score.version, score.value, score.prior) == ("big:0.0", None, None)
    assert (one.asked, two.asked) == ([2, 2], [2, 2])


async def test_a_turn_waits_for_an_engine_that_is_set_aside_and_nothing_is_invented() -> None:
    engine = Scoring("one")
    fleet, kept = fleet_of(engine), list[TurnScore]()
    config = TeacherConfig(name="t", policy="big")
    scorer = TeacherScorer("big", fleet)

    async def start() -> LoopWorker:
        return LoopWorker(scorer, config)

    async def keep(name: str, scores: Sequence[TurnScore]) -> None:
        kept.extend(scores)

    fleet.suspect("one", "silent")
    with pytest.raises(EpisodeError, match="no engine of big serves"):
        await scorer.score([a_turn(0)])
    queue = ScorerQueue(config, start, keep)
    await queue.open()
    task = asyncio.create_task(queue.run())
    asked = queue.ask(a_turn(0))
    await until(lambda: queue.counts.totals["not_sent"] > 0)
    assert (asked.done(), kept, engine.asked) == (False, [], [])
    fleet.clear_suspicion("one")
    score = await asyncio.wait_for(asked, GENEROUS_S)
    task.cancel()
    await asyncio.wait([task])
    assert (score.failure, score.logprobs.tolist()) == (None, [-2.0, -3.0])
    assert [one.key for one in kept] == [score.key]


async def test_a_turn_over_which_the_weights_changed_fails() -> None:
    engine = Scoring("one", lambda: fleet.members["one"].served.append(PolicyVersion(0, 1)))
    fleet = fleet_of(engine)
    (score,) = await TeacherScorer("big", fleet).score([a_turn(0)])
    assert (score.logprobs, score.failure.kind) == (None, "version")


async def test_a_turn_that_its_engine_refuses_fails_alone() -> None:
    numbers = iter([None, EngineError("too long")])

    def fail_second() -> None:
        if (error := next(numbers)) is not None:
            raise error

    scored, refused = await TeacherScorer("big", fleet_of(Scoring("one", fail_second))).score([a_turn(0), a_turn(1)])
    assert scored.failure is None
    assert (refused.logprobs, refused.failure.boundary) == (None, Boundary.SCORER)
    assert "too long" in refused.failure.message


async def test_a_served_policy_of_another_vocabulary_is_no_teacher(tiny_model: Path, other_model: Path) -> None:
    served = {"big": ServedPolicy(other_model, fleet_of(Scoring("one")))}
    setting = ScorerSetting({"main": tiny_model}, served)
    with pytest.raises(ConfigError, match=r"scorer 't' is a teacher with another vocabulary than policy 'main': token"):
        await teacher.build(TeacherConfig(name="t", policy="big"), setting)


def refuses(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return 404, {"error": {"message": f"no {path}"}}


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({}, "serves no teacher: 'model_path'; start it there"),
        (
            {"model_path": "/elsewhere/big"},
            "has its tokenizer at /elsewhere/big, which is not here; give a folder with a copy",
        ),
    ],
)
async def test_what_a_url_serves_is_judged_before_the_first_turn(
    info: dict[str, Any], says: str, tiny_model: Path
) -> None:
    async with running(EngineStub(info, refuses)) as stub:
        with pytest.raises(ConfigError, match=says) as error:
            await teacher.build(TeacherConfig(name="t", url=stub.url), ScorerSetting({"main": tiny_model}))
    assert "\n" not in str(error.value)


async def test_a_url_of_another_vocabulary_is_no_teacher(tiny_model: Path, other_model: Path) -> None:
    async with running(EngineStub({"model_path": str(other_model)}, refuses)) as stub:
        with pytest.raises(ConfigError, match="another vocabulary than policy 'main'"):
            await teacher.build(TeacherConfig(name="t", url=stub.url), ScorerSetting({"main": tiny_model}))


async def test_a_url_of_nothing_is_named(tiny_model: Path) -> None:
    config = TeacherConfig(name="t", url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"scorer 't': http://127\.0\.0\.1:9 serves no teacher: .*start it there"):
        await teacher.build(config, ScorerSetting({"main": tiny_model}))


async def test_an_engine_of_others_that_takes_other_weights_scores_no_batch_with_both(tiny_model: Path) -> None:
    """Its label is read before and after a batch, and stands in the version of each score."""
    info = {"model_path": str(tiny_model), "weight_version": "7"}

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/generate":
            return 200, {}
        ids, start = body["input_ids"], body["logprob_start_len"]
        logprobs = [[-0.5, token, None] for token in ids[start:]]
        return 200, {"meta_info": {"id": body["rid"], "prompt_tokens": len(ids), "input_token_logprobs": logprobs}}

    async with running(EngineStub(info, answer)) as stub:
        scorer = await teacher.build(TeacherConfig(name="t", url=stub.url), ScorerSetting({"main": tiny_model}))
        (score,) = await scorer.score([a_turn(0)])
        assert (score.version, score.logprobs.tolist()) == ("t:7", [-0.5, -0.5])

        def swap(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            stub.info = {**info, "weight_version": "8"}
            return answer(path, body)

        stub.answer = swap
        with pytest.raises(EpisodeError, match="t:7 became t:8 while it scored a batch") as raised:
            await scorer.score([a_turn(0)])
        assert raised.value.failure.kind == "version"
        (score,) = await scorer.score([a_turn(0)])
        assert score.version == "t:8"
        await scorer.close()
