"""What a served reward model's scorer makes of answers; tests/integration asks real servers."""

from __future__ import annotations

import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_stub import Answer, EngineStub, embedding, running

from agentrl.config.base import parse_config
from agentrl.scorers import prm_engine
from agentrl.scorers.config import find_definition
from agentrl.scorers.definition import ScorerSetting
from agentrl.scorers.prm_engine import GenerativeForm, PrmEngineConfig, PrmEngineScorer
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.testing.tiny_reward import make_tiny_reward_model
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.turn_score import ScoredTurn, TurnKey, token_digest

HEAD = {"is_generation": False, "weight_version": "1.0"}
QUESTION = GenerativeForm(kind="generative", question="what is the name", good="a", bad="b")


def turn(length: int = 9, reply_start: int = 4) -> ScoredTurn:
    ids = np.arange(10, 10 + length, dtype=np.int32)
    return ScoredTurn(TurnKey("e-0", "agent", 0, token_digest(ids)), "main", ids, reply_start)


def by_length(path: str, body: dict[str, Any]) -> Answer:
    return embedding(body, float(len(body["input_ids"])))


@pytest.fixture
async def stub(tiny_model: Path) -> AsyncIterator[EngineStub]:
    async with running(EngineStub({**HEAD, "model_path": str(tiny_model)}, by_length)) as stub:
        yield stub


async def build(stub: EngineStub, policy: Path, **options: Any) -> PrmEngineScorer:
    scorer = await prm_engine.build(
        PrmEngineConfig(name="judge", url=stub.url, **options), ScorerSetting({"main": policy})
    )
    stub.asked.clear()
    return scorer


async def test_both_states_of_a_turn_are_asked_for_and_bear_folder_and_label(
    stub: EngineStub, tiny_model: Path
) -> None:
    scorer = await build(stub, tiny_model)
    scores = await scorer.score([turn(), turn(6, 0)])
    assert [(score.value, score.prior) for score in scores] == [(9.0, 4.0), (6.0, None)]
    assert {score.version for score in scores} == {f"prm_engine:{tiny_model.name}@1.0"}
    assert sorted(len(body["input_ids"]) for _, body in stub.asked) == [4, 6, 9]
    assert {path for path, _ in stub.asked} == {"/classify"}
    await scorer.close()


async def test_two_labels_give_the_probability_of_the_second(stub: EngineStub, tiny_model: Path) -> None:
    stub.answer = lambda _, body: embedding(body, 0.5, 2.0)
    scorer = await build(stub, tiny_model)
    (score,) = await scorer.score([turn()])
    assert score.value == pytest.approx(math.exp(2.0) / (math.exp(0.5) + math.exp(2.0)))
    await scorer.close()


async def test_a_batch_whose_version_changes_is_asked_again_and_mixes_none(stub: EngineStub, tiny_model: Path) -> None:
    scorer = await build(stub, tiny_model)

    def changing(path: str, body: dict[str, Any]) -> Answer:
        if len(stub.asked) == 2:
            stub.info = {**stub.info, "weight_version": "2.0"}
        label = stub.info["weight_version"]
        return embedding(body, 1.0 if label == "1.0" else 2.0, label=label)

    stub.answer = changing
    scores = await scorer.score([turn(), turn(8), turn(7)])
    assert [(score.value, score.prior) for score in scores] == [(2.0, 2.0)] * 3
    assert {score.version for score in scores} == {f"prm_engine:{tiny_model.name}@2.0"}
    assert scorer.asked_again == 1
    await scorer.close()


async def test_an_answer_of_other_weights_than_the_server_says_it_has_is_asked_again(
    stub: EngineStub, tiny_model: Path
) -> None:
    scorer = await build(stub, tiny_model)
    stub.answer = lambda _, body: embedding(body, 1.0, label="1.0" if len(stub.asked) > 2 else "0.9")
    (score,) = await scorer.score([turn()])
    assert (score.value, scorer.asked_again) == (1.0, 1)
    await scorer.close()


async def test_a_server_whose_version_never_rests_fails_the_batch(stub: EngineStub, tiny_model: Path) -> None:
    scorer = await build(stub, tiny_model)
    stub.answer = lambda _, body: embedding(body, 1.0, label="other")
    with pytest.raises(EpisodeError, match="changed its weights during each of 4 tries") as raised:
        await scorer.score([turn()])
    assert raised.value.failure.kind == "version"
    await scorer.close()


async def test_a_refused_turn_fails_alone(stub: EngineStub, tiny_model: Path) -> None:
    scorer = await build(stub, tiny_model)
    long = {"error": {"message": "The input is longer than the model's context length"}}
    stub.answer = lambda path, body: (400, long) if len(body["input_ids"]) > 20 else by_length(path, body)
    refused, scored = await scorer.score([turn(30, 4), turn()])
    assert refused.failure is not None
    assert refused.failure.kind == "refused"
    assert "longer than the model's context" in refused.failure.message
    assert scored.value == 9.0
    await scorer.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda body: embedding({**body, "rid": "another"}, 1.0), "identity"),
        (lambda body: embedding(body, 1.0, 2.0, 3.0), "answer"),
        (lambda body: (500, {"error": {"message": "out of memory"}}), "server"),
        (lambda body: (503, {"error": {"message": "starting"}}), "unreachable"),
    ],
)
async def test_an_answer_that_cannot_be_used_fails_the_batch(
    answer: Any, kind: str, stub: EngineStub, tiny_model: Path
) -> None:
    scorer = await build(stub, tiny_model)
    stub.answer = lambda _, body: answer(body)
    with pytest.raises(EpisodeError) as raised:
        await scorer.score([turn()])
    assert raised.value.failure.kind == kind
    await scorer.close()


async def test_a_server_of_the_other_form_is_named_with_the_form(stub: EngineStub, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r'serves a head; give form\.kind = "classification"'):
        await build(stub, tiny_model, form=QUESTION)
    stub.info = {**stub.info, "is_generation": True}
    with pytest.raises(ConfigError, match=r'serves a language model; give form\.kind = "generative"'):
        await build(stub, tiny_model)
    assert stub.asked == [], "SGLang dies of a request for what it does not serve"


async def test_a_served_model_of_another_tokenizer_is_named(stub: EngineStub, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "policy", shape=TINY_SHAPE.model_copy(update={"vocabulary_tokens": 300}))
    with pytest.raises(ConfigError, match="a PRM of another tokenizer than policy 'main': token"):
        await build(stub, other)


async def test_a_tokenizer_that_is_not_here_is_asked_for(stub: EngineStub, tiny_model: Path) -> None:
    stub.info = {**stub.info, "model_path": "/elsewhere/prm"}
    with pytest.raises(ConfigError, match="has its tokenizer at /elsewhere/prm, which is not here"):
        await build(stub, tiny_model)
    await (await build(stub, tiny_model, tokenizer=tiny_model)).close()


async def test_a_head_without_an_offset_is_refused_where_sglang_makes_one_up(
    stub: EngineStub, tiny_model: Path, tmp_path: Path
) -> None:
    folder = make_tiny_reward_model(tmp_path / "sequence", tiny_model, form="Sequence")
    stub.info = {**stub.info, "model_path": str(folder), "architectures": ["Qwen3ForSequenceClassification"]}
    with pytest.raises(ConfigError, match=r"a random offset at each start, since .* has no tensor score\.bias"):
        await build(stub, tiny_model)
    shutil.copytree(make_tiny_reward_model(tmp_path / "token", tiny_model), folder, dirs_exist_ok=True)
    await (await build(stub, tiny_model)).close()


async def test_a_server_that_is_absent_is_named_before_the_first_episode(tiny_model: Path) -> None:
    absent = EngineStub({}, by_length, url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"'judge': engine judge at http://127\.0\.0\.1:9 does not answer"):
        await build(absent, tiny_model)


async def test_an_answer_of_several_tokens_is_refused(stub: EngineStub, tiny_model: Path) -> None:
    stub.info = {**stub.info, "is_generation": True}
    several = QUESTION.model_copy(update={"good": "xyzzy"})
    assert len(FastTokenizer.load(tiny_model).encode("xyzzy")) > 1
    with pytest.raises(ConfigError, match=r"the answer 'xyzzy' is \d tokens of the model"):
        await build(stub, tiny_model, form=several)


def test_the_kind_is_registered_and_its_address_is_checked() -> None:
    assert find_definition("prm_engine").config is PrmEngineConfig
    with pytest.raises(ConfigError, match="url"):
        parse_config(PrmEngineConfig, {"name": "judge", "url": "10.0.0.5:30000"}, "recipe")
