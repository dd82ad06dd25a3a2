"""Trainer and engine against float64 forwards of transformers, for every architecture of the table.

Every parameter is drawn at random, and windows, caps and experts act within the texts. The comparisons are written
here once more: they share nothing with the check that runs before a start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.models.drawing import write_drawn_model
from agentrl.models.verified import VERIFIED
from agentrl.testing.tiny_architectures import SUPPORTED, WINDOW, tiny_config
from agentrl.trainer.model import PolicyModel, load_network
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence

# transformers computes most softmaxes of attention in float32, whatever the model's precision.
BOUND_NATS = 5e-6
LENGTHS = (41, 7, 29)


@dataclass(frozen=True)
class Case:
    """A random model, texts, and what transformers says of each text alone: logits_TV."""

    folder: Path
    texts: list[np.ndarray]
    logits: list[torch.Tensor]


def make_case(name: str, folder: Path) -> Case:
    config = tiny_config(name)
    write_drawn_model(config, folder, seed=7)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, config.vocab_size, length) for length in LENGTHS]
    network = plain(folder)
    with torch.no_grad():
        return Case(folder, texts, [network(torch.from_numpy(text)[None]).logits[0] for text in texts])


def plain(folder: Path, **changes: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", **changes
    ).eval()


def sequence(text: np.ndarray) -> TokenSequence:
    selected = np.arange(1, len(text))
    none = np.zeros(len(selected), np.float32)
    return TokenSequence(text.astype(np.int32), selected, none, none, none, none, none, None)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Cases that were asked for."""
    return {}


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Case:
    name = request.param
    if name not in cases:
        cases[name] = make_case(name, tmp_path_factory.mktemp(name))
    return cases[name]


every = pytest.mark.parametrize("case", SUPPORTED, indirect=True)


@every
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_computes_what_transformers_computes(case, temperature):
    policy = PolicyModel(load_network(case.folder, torch.float64), chunk_tokens=13)
    with torch.no_grad():
        packed = policy(pack([sequence(text) for text in case.texts], "cpu"), temperature)
    alone = []
    for text, logits_TV in zip(case.texts, case.logits, strict=True):
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        alone += [logprobs_TV[position - 1, text[position]] for position in range(1, len(text))]
    assert packed.dtype is torch.float64
    assert float((packed - torch.stack(alone)).abs().max()) < BOUND_NATS


@every
def test_the_engine_computes_what_transformers_computes(case):
    options = EngineOptions(model=case.folder, port=1, max_running_requests=4, deterministic=True)
    model, done, gaps = ServedModel(options), [0, 0, 0], []
    # Chunks of a prefill, padded to the longest, then a decode step of rows that are not neighbours.
    for rows, sizes in (([0, 1, 2], [17, 5, 11]), ([0, 2], [20, 3]), ([0, 2], [1, 1]), ([0, 1, 2], [3, 2, 14])):
        ids = np.zeros((len(rows), max(sizes)), np.int64)
        for place, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            ids[place, :size] = case.texts[row][done[row] : done[row] + size]
        starts = np.asarray([done[row] for row in rows])
        hidden = model.forward(np.asarray(rows), ids, starts, np.zeros(len(rows), np.int64))
        for place, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            mine = model.logits(hidden[place, :size]).log_softmax(-1)
            gaps.append((mine - case.logits[row][done[row] : done[row] + size].log_softmax(-1)).abs().max())
            done[row] += size
    assert done == list(LENGTHS)
    assert float(torch.stack(gaps).max()) < BOUND_NATS


@pytest.mark.parametrize("case", ["gemma2", "gemma3_text", "gpt_oss", "mistral_window", "qwen3_window"], indirect=True)
def test_windows_and_caps_of_these_cases_act(case):
    config = tiny_config(case.folder.name.rstrip("0"))
    assert config.sliding_window == WINDOW < min(LENGTHS[0], LENGTHS[2])
    features = {"sliding_window": 1000} | ({"attn_logit_softcapping": 1e4} if config.model_type == "gemma2" else {})
    for name, value in features.items():
        network = plain(case.folder, **{name: value})
        with torch.no_grad():
            other = network(torch.from_numpy(case.texts[0])[None]).logits[0]
        assert float((other.log_softmax(-1) - case.logits[0].log_softmax(-1)).abs().max()) > 0.05


def test_the_table_names_what_is_compared():
    assert {config_type for config_type, _ in SUPPORTED.values()} == {a.model_type for a in VERIFIED}
