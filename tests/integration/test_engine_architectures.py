"""Windows, sinks and experts in real processes: what a trainer trains is served, and its export loads elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_server import EngineCalls, EngineServer, logprobs_of, running_engine
from server_traits import EMBEDDED
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.models.drawing import write_drawn_model
from agentrl.testing.tiny_architectures import WINDOW, tiny_config
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.rank import RankSpec, TrainerRank
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.errors import ConfigError
from agentrl.types.version import PolicyVersion

FIRST = PolicyVersion(0, 0)
CONFIG = TrainerConfig(optimizer=OptimizerConfig(kind="sgd", learning_rate=0.1, momentum=0.0, max_grad_norm=1e9))
PROMPT = list(range(20, 20 + 2 * WINDOW))


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def plain_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of tokens 1 to n-1."""
    table = plain(folder)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def rank_of(model: Path, folder: Path) -> TrainerRank:
    settings = CONFIG.model_dump(), AlgorithmConfig().model_dump()
    return TrainerRank(RankSpec("main", str(model), FIRST, 0, 1, str(folder / "rendezvous"), 1.0, *settings))


@pytest.fixture
def group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_window", "mixtral", "deepseek_v3"])
@pytest.mark.usefixtures("group")
async def test_what_is_trained_is_served_and_loads_elsewhere(name, tmp_path):
    model = tmp_path / "model"
    write_drawn_model(tiny_config(name), model)
    rank = rank_of(model, tmp_path)
    rank.load()
    ids = np.asarray(PROMPT, np.int32)
    selected = np.arange(1, len(ids))
    unused = np.zeros(len(selected), np.float32)
    rank.supervised_step([TokenSequence(ids, selected, unused, unused, unused, unused, unused, None)], 1.0)
    rank.save(str(tmp_path / "saved"))
    canary = rank.canary(PROMPT)
    expected = plain_logprobs(tmp_path / "saved", PROMPT)
    assert torch.tensor(canary.logprobs) == pytest.approx(expected, abs=1e-4)
    assert float((expected - plain_logprobs(model, PROMPT)).abs().max()) > 0.01
    rank.restore(str(tmp_path / "saved"))
    assert rank.canary(PROMPT) == canary
    with running_engine(model, tmp_path / "engine.log") as url:
        async with EngineCalls.of(EngineServer(url, model, model, EMBEDDED)) as engine:
            for folder, version in ((model, "0.0"), (tmp_path / "saved", "0.1")):
                if folder != model:
                    await engine.load(folder, version)
                answer = await engine.generate(PROMPT, max_new_tokens=2 * WINDOW, ignore_eos=True)
                whole = plain_logprobs(folder, PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
                assert logprobs_of(answer) == pytest.approx(whole.tolist(), abs=1e-4)


def test_a_trainer_does_not_load_a_model_that_is_refused(tmp_path):
    write_drawn_model(tiny_config("falcon_h1"), tmp_path / "model")
    with pytest.raises(ConfigError, match="the trainer cannot run models of type falcon_h1: it has recurrent layers"):
        rank_of(tmp_path / "model", tmp_path).load()


@pytest.mark.long
def test_an_engine_process_says_why_it_does_not_start(tmp_path):
    write_drawn_model(tiny_config("bloom"), tmp_path / "model")
    message = r"the server did not start:(.|\n)*\(bloom\) has no `layers`.*choose a model of a verified type"
    with pytest.raises(AssertionError, match=message), running_engine(tmp_path / "model", tmp_path / "engine.log"):
        pass
