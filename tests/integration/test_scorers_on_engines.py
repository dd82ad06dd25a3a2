"""Served reward models on real servers, against plain transformers: no part of ours computes what is expected."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_server import EngineCalls, EngineServer, Reference
from transformers import AutoModelForTokenClassification

from agentrl.scorers import prm_engine, teacher
from agentrl.scorers.definition import ScorerSetting
from agentrl.scorers.prm_engine import ClassificationForm, GenerativeForm, PrmEngineConfig, PrmEngineScorer
from agentrl.scorers.teacher import TeacherConfig
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.turn_score import ScoredTurn, TurnKey, check_turn_score, token_digest

QUESTION = GenerativeForm(kind="generative", question="<|im_start|>what is the count\n", good="name", bad="query")


def turn(length: int, reply_start: int, step: int = 7) -> ScoredTurn:
    ids = np.array([(step * n) % 280 + 10 for n in range(length)], np.int32)
    return ScoredTurn(TurnKey("e-0", "agent", 0, token_digest(ids)), "main", ids, reply_start)


# The second goes on behind the first, whose tokens a server has in its cache by then.
TURNS = [turn(31, 19), turn(80, 40), turn(12, 3, 11)]


async def scorer_of(server: EngineServer, form: ClassificationForm | GenerativeForm) -> PrmEngineScorer:
    config = PrmEngineConfig(name="judge", url=server.url, form=form, call_s=120.0)
    return await prm_engine.build(config, ScorerSetting({"main": server.model}))


async def test_a_question_is_answered_with_hugging_faces_probabilities(
    engine: EngineCalls, reference: Reference
) -> None:
    tokenizer = FastTokenizer.load(engine.server.model)
    question, good, bad = (tokenizer.encode(text) for text in (QUESTION.question, QUESTION.good, QUESTION.bad))
    assert (len(good), len(bad)) == (1, 1)
    scorer = await scorer_of(engine.server, QUESTION)
    scores = await scorer.score(TURNS)
    for asked, score in zip(TURNS, scores, strict=True):
        last = reference.distributions(engine.server.model, [*asked.token_ids.tolist(), *question])[-1]
        odds = math.exp(last[good[0]]), math.exp(last[bad[0]])
        assert check_turn_score(asked, score).value == pytest.approx(odds[0] / sum(odds), abs=1e-4)
        assert score.prior is None
    assert {score.version for score in scores} == {f"prm_engine:{engine.server.model.name}@0.0"}
    await scorer.close()


async def test_one_answer_alone_is_worth_its_probability(engine: EngineCalls, reference: Reference) -> None:
    tokenizer = FastTokenizer.load(engine.server.model)
    alone = QUESTION.model_copy(update={"bad": None})
    scorer = await scorer_of(engine.server, alone)
    (score,) = await scorer.score(TURNS[:1])
    ids = [*TURNS[0].token_ids.tolist(), *tokenizer.encode(QUESTION.question)]
    (good,) = tokenizer.encode(QUESTION.good)
    assert score.value == pytest.approx(math.exp(reference.distributions(engine.server.model, ids)[-1][good]), rel=1e-3)
    await scorer.close()


@torch.no_grad()
def heads(folder: Path, asked: ScoredTurn) -> list[float]:
    """Plain transformers' values of both states of a turn, each context alone."""
    network = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    contexts = (asked.token_ids, asked.token_ids[: asked.reply_start])
    return [network(torch.tensor([ids.tolist()])).logits[0, -1, 0].item() for ids in contexts]


async def test_sglang_serves_the_head_of_a_token_model_as_transformers_computes_it(reward_engine: EngineCalls) -> None:
    scorer = await scorer_of(reward_engine.server, ClassificationForm())
    for asked in TURNS:
        (score,) = await scorer.score([asked])
        assert [score.value, score.prior] == pytest.approx(heads(reward_engine.server.model, asked), abs=1e-4)
    again = await scorer.score(TURNS)
    expected = [heads(reward_engine.server.model, asked) for asked in TURNS]
    assert [score.value for score in again] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert {score.version for score in again} == {f"prm_engine:{reward_engine.server.model.name}@0.0"}
    await scorer.close()


async def test_a_newer_model_that_sglang_loads_is_in_the_version_of_its_scores(reward_engine: EngineCalls) -> None:
    scorer = await scorer_of(reward_engine.server, ClassificationForm())
    (old,) = await scorer.score(TURNS[:1])
    other = reward_engine.server.other_model
    await reward_engine.load(other, "0.7")
    (new,) = await scorer.score(TURNS[:1])
    assert new.version.endswith("@0.7")
    assert [new.value, new.prior] == pytest.approx(heads(other, TURNS[0]), abs=1e-4)
    assert abs(new.value - old.value) > 1e-2
    await scorer.close()


async def test_a_context_that_sglang_finds_too_long_fails_alone(reward_engine: EngineCalls) -> None:
    scorer = await scorer_of(reward_engine.server, ClassificationForm())
    refused, scored = await scorer.score([turn(20_000, 10), TURNS[0]])
    assert refused.failure is not None
    assert refused.failure.kind == "refused"
    assert scored.failure is None
    await scorer.close()


async def test_a_teacher_gives_hugging_faces_log_probabilities_of_each_replys_tokens(
    engine: EngineCalls, reference: Reference
) -> None:
    model = engine.server.model
    config = TeacherConfig(name="teacher", url=engine.server.url, call_s=120.0)
    scorer = await teacher.build(config, ScorerSetting({"main": model}))
    # The opening of a context has no distribution to be drawn from: a reply begins behind it.
    asked = [*TURNS, turn(9, 1), turn(14, 13)]
    for one, score in zip(asked, await scorer.score(asked), strict=True):
        ids = one.token_ids.tolist()
        expected = reference.sampled(model, ids[: one.reply_start], ids[one.reply_start :])
        logprobs = check_turn_score(one, score).logprobs
        assert logprobs is not None
        assert logprobs.tolist() == pytest.approx(expected, abs=1e-4)
        assert (score.value, score.prior, score.version) == (None, None, "teacher:0.0")
    await scorer.close()


async def test_a_context_that_is_too_long_for_a_teacher_fails_alone(engine: EngineCalls) -> None:
    config = TeacherConfig(name="teacher", url=engine.server.url, call_s=120.0)
    scorer = await teacher.build(config, ScorerSetting({"main": engine.server.model}))
    refused, scored = await scorer.score([turn(20_000, 10), TURNS[0]])
    assert refused.logprobs is None
    assert refused.failure is not None
    assert scored.failure is None
    await scorer.close()
