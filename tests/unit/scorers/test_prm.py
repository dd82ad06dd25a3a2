"""A reward model in process, against transformers' own classes on one context at a time, without padding."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig
from transformers import BertForTokenClassification as BertTokens

from agentrl.models import reward, reward_folder
from agentrl.models.reward import RewardModel
from agentrl.models.reward_folder import MARKER, FolderChangingError, replace_reward_model, stated_version
from agentrl.scorers import prm
from agentrl.scorers.config import find_definition
from agentrl.scorers.definition import ScorerSetting
from agentrl.scorers.prm import PrmConfig, PrmScorer
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.testing.tiny_reward import make_tiny_reward_model
from agentrl.types.errors import ConfigError
from agentrl.types.turn_score import ScoredTurn, TurnKey, check_turn_score, token_digest

CLASSES = {"Token": AutoModelForTokenClassification, "Sequence": AutoModelForSequenceClassification}


def turn(length: int, reply_start: int, step: int = 7) -> ScoredTurn:
    ids = np.array([(step * n) % 280 + 5 for n in range(length)], np.int32)
    return ScoredTurn(TurnKey("e-0", "agent", 0, token_digest(ids)), "main", ids, reply_start)


TURNS = [turn(31, 19), turn(7, 5, 11), turn(90, 60, 13), turn(12, 0, 3)]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_reward_model(tmp_path_factory.mktemp("prm") / "model", tiny_model)


async def build(folder: Path, policy: Path) -> PrmScorer:
    return await prm.build(PrmConfig(name="judge", model=folder), ScorerSetting({"main": policy}))


@torch.no_grad()
def plain(folder: Path, form: str, ids: Sequence[int]) -> float:
    """What transformers' own class says of the last token of a context."""
    network = CLASSES[form].from_pretrained(folder, dtype=torch.float32).eval()
    logits = network(torch.tensor([list(map(int, ids))])).logits
    last = logits[0, -1] if form == "Token" else logits[0]
    return last[0].item() if len(last) == 1 else last.softmax(-1)[1].item()


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("form", ["Token", "Sequence"])
async def test_a_padded_batch_gives_what_transformers_gives_of_each_context_alone(
    form: str, labels: int, tiny_model: Path, tmp_path: Path
) -> None:
    folder = make_tiny_reward_model(tmp_path / "model", tiny_model, labels=labels, form=form)
    scores = await (await build(folder, tiny_model)).score(TURNS)
    for asked, score in zip(TURNS, scores, strict=True):
        assert check_turn_score(asked, score).value == pytest.approx(plain(folder, form, asked.token_ids), abs=1e-5)
        if asked.reply_start:
            before = plain(folder, form, asked.token_ids[: asked.reply_start])
            assert score.prior == pytest.approx(before, abs=1e-5)
        else:
            assert score.prior is None
    assert len({round(score.value, 4) for score in scores}) == len(TURNS), "the model is too uniform to prove anything"


async def test_a_context_that_is_too_long_fails_alone(folder: Path, tiny_model: Path) -> None:
    scores = await (await build(folder, tiny_model)).score([turn(TINY_SHAPE.context_tokens + 1, 3), TURNS[0]])
    assert scores[0].failure is not None
    assert scores[0].failure.kind == "too_long"
    assert scores[0].value is None
    assert scores[1].value is not None


async def test_a_newer_model_is_taken_before_the_next_batch_and_each_score_bears_its_own_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    first = replace_reward_model(make_tiny_reward_model(tmp_path / "a", tiny_model, seed=1), folder)
    scorer = await build(folder, tiny_model)
    (old,) = await scorer.score(TURNS[:1])
    second = replace_reward_model(make_tiny_reward_model(tmp_path / "b", tiny_model, seed=2), folder)
    (new,) = await scorer.score(TURNS[:1])
    assert (old.version, new.version) == (f"prm:{first.name}", f"prm:{second.name}")
    assert old.version != new.version
    assert new.value == pytest.approx(plain(folder, "Token", TURNS[0].token_ids), abs=1e-5)
    assert old.value != pytest.approx(new.value, abs=1e-3)


async def test_a_model_that_is_replaced_in_mid_batch_mixes_into_none_of_its_scores(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    replace_reward_model(make_tiny_reward_model(tmp_path / "a", tiny_model, seed=1), folder)
    expected = [plain(folder, "Token", asked.token_ids) for asked in TURNS]
    scorer = await build(folder, tiny_model)
    values = RewardModel.values

    def replaced_meanwhile(self: RewardModel, *arguments: object) -> object:
        replace_reward_model(make_tiny_reward_model(tmp_path / "b", tiny_model, seed=2), folder)
        return values(self, *arguments)

    monkeypatch.setattr(RewardModel, "values", replaced_meanwhile)
    scores = await scorer.score(TURNS)
    assert [score.value for score in scores] == pytest.approx(expected, abs=1e-5)
    assert len({score.version for score in scores}) == 1


async def test_files_of_two_versions_are_never_computed_with(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new weights are there already, and the marker is still the old one."""
    folder = tmp_path / "model"
    first = replace_reward_model(make_tiny_reward_model(tmp_path / "a", tiny_model, seed=1), folder)
    scorer = await build(folder, tiny_model)
    (before,) = await scorer.score(TURNS[:1])
    other = make_tiny_reward_model(tmp_path / "b", tiny_model, seed=2)
    second = reward_folder.found_version(other)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(FolderChangingError, match=r"model\.safetensors is not the file"):
        RewardModel.load(folder)
    (meanwhile,) = await scorer.score(TURNS[:1])
    assert (meanwhile.version, meanwhile.value) == (f"prm:{first.name}", before.value)
    text = (folder / MARKER).read_text()
    (folder / MARKER).write_text(text.replace(first.name, second.name))  # a marker that was damaged
    with caplog.at_level(logging.WARNING):
        (meanwhile,) = await scorer.score(TURNS[:1])
        await scorer.score(TURNS[:1])
    assert meanwhile.version == f"prm:{first.name}"
    assert [record.message.count("goes on with version") for record in caplog.records] == [1], "told once"


async def test_a_start_waits_for_the_end_of_a_replacement(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    replace_reward_model(make_tiny_reward_model(tmp_path / "a", tiny_model, seed=1), folder)
    made = make_tiny_reward_model(tmp_path / "b", tiny_model, seed=2)
    shutil.copy(made / "model.safetensors", folder / "model.safetensors")
    building = asyncio.create_task(build(folder, tiny_model))
    await asyncio.sleep(0)
    version = replace_reward_model(made, folder)
    (score,) = await (await building).score(TURNS[:1])
    assert score.version == f"prm:{version.name}"


async def test_a_model_of_another_tokenizer_is_named_with_the_token_that_differs(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "policy", shape=TINY_SHAPE.model_copy(update={"vocabulary_tokens": 300}))
    with pytest.raises(ConfigError, match=r"'judge' has a PRM of another tokenizer than policy 'main': token \d+ is"):
        await build(folder, other)


async def test_a_folder_that_is_no_reward_model_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no reward model at .*absent; make one with `agentrl prm train`"):
        await build(tmp_path / "absent", tiny_model)
    with pytest.raises(ConfigError, match="architecture Qwen3ForCausalLM; a reward model is one of"):
        await build(tiny_model, tiny_model)
    three = make_tiny_reward_model(tmp_path / "three", tiny_model, labels=3)
    with pytest.raises(ConfigError, match="has 3 labels; it must have 1, a number, or 2"):
        await build(three, tiny_model)


async def test_a_model_whose_head_was_never_written_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "headless")
    config = (folder / "config.json").read_text().replace("ForCausalLM", "ForTokenClassification")
    (folder / "config.json").write_text(config.replace('"vocab_size"', '"id2label": {"0": "worth"}, "vocab_size"'))
    with pytest.raises(ConfigError, match=r"the weights of the reward model in .* lack score\.bias"):
        await build(folder, tiny_model)


async def test_a_model_that_looks_ahead_is_refused(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal = reward.head_outputs

    def both_ways(network: object, contexts: Sequence[np.ndarray], *arguments: object) -> torch.Tensor:
        return causal(network, contexts, *arguments) + float(sum(len(ids) for ids in contexts))

    monkeypatch.setattr(reward, "head_outputs", both_ways)
    with pytest.raises(ConfigError, match="values a state by what comes after it; choose a decoder"):
        await build(folder, tiny_model)


async def test_an_encoder_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=309,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
    )
    BertTokens(config).save_pretrained(tmp_path / "bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / "bert" / name)
    with pytest.raises(ConfigError, match="has no linear head `score`"):
        await build(tmp_path / "bert", tiny_model)


def test_a_model_of_another_program_takes_the_place_of_none(tiny_model: Path, tmp_path: Path) -> None:
    assert stated_version(make_tiny_reward_model(tmp_path / "model", tiny_model)) is None


def test_the_kind_is_registered_as_one_that_computes() -> None:
    definition = find_definition("prm")
    assert definition.computes
    assert definition.config is PrmConfig
