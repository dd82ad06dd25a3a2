"""Rotary frequencies that follow the longest sequence of a pass: fixed up to a length, refused beyond it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_models_equality import BOUND_NATS, plain, sequence
from transformers import PreTrainedConfig

from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.models.drawing import write_drawn_model
from agentrl.models.support import fixed_rotary_positions
from agentrl.testing.tiny_architectures import tiny_config
from agentrl.trainer.model import PolicyModel, load_network
from agentrl.trainer.packing import pack
from agentrl.types.errors import ConfigError, TrainerError

FIXED = 32
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 16.0]}


def longrope() -> PreTrainedConfig:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": FIXED, **FACTORS}
    return tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=FIXED, sliding_window=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_drawn_model(longrope(), tmp_path / "model")
    return tmp_path / "model"


def test_the_length_of_fixed_frequencies_is_read_from_every_kind_of_configuration():
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    assert fixed_rotary_positions(longrope()) == FIXED
    assert fixed_rotary_positions(tiny_config("llama", rope_parameters=dynamic)) == 128
    for name in ("llama", "gemma3_text", "gpt_oss", "smollm3"):
        assert fixed_rotary_positions(tiny_config(name)) is None


def test_frequencies_do_change_beyond_that_length(folder):
    text = torch.from_numpy(np.random.default_rng(0).integers(0, 97, FIXED + 1))[None]
    with torch.no_grad():
        longer, shorter = (plain(folder)(text[:, :length]).logits[0, :FIXED] for length in (FIXED + 1, FIXED))
    assert float((longer.log_softmax(-1) - shorter.log_softmax(-1)).abs().max()) > 0.01


def test_an_engine_offers_the_contexts_that_it_computes_alike(folder):
    assert ServedModel(EngineOptions(model=folder, port=1, max_running_requests=2)).context_length == FIXED
    message = (
        f"context_length is 64, but the rotary frequencies of this phi3 change at {FIXED} tokens.*--context-length"
    )
    with pytest.raises(ConfigError, match=message):
        ServedModel(EngineOptions(model=folder, port=1, max_running_requests=2, context_length=64))


def test_padding_and_idle_rows_do_not_change_the_frequencies_of_others(folder):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 97, 30), rng.integers(0, 97, 20)]
    model = ServedModel(EngineOptions(model=folder, port=1, max_running_requests=3, deterministic=True))
    ids = np.zeros((2, 20), np.int64)
    ids[0, :4], ids[1] = texts[0][26:], texts[1]
    first = model.forward(slice(0, 1), texts[0][None, :26], np.zeros(1, np.int64), np.zeros(1, np.int64))
    # Row 0 goes on for 4 tokens, padded to the 20 of row 1: to position 45.
    both = model.forward(slice(0, 2), ids, np.asarray([26, 0]), np.zeros(2, np.int64))
    # An idle row stands at the last column of the cache.
    last = model.cache.capacity - 1
    more = model.forward(slice(0, 3), np.asarray([[5], [6], [0]]), np.asarray([30, 20, last]), np.zeros(3, np.int64))
    network = plain(folder)
    for row, (text, token) in enumerate(zip(texts, (5, 6), strict=True)):
        hidden = torch.cat([first[0], both[0, :4], more[0]] if row == 0 else [both[1], more[1]])
        with torch.no_grad():
            expected = network(torch.from_numpy(np.append(text, token))[None]).logits[0].log_softmax(-1)
        assert float((model.logits(hidden).log_softmax(-1) - expected).abs().max()) < BOUND_NATS


def test_the_trainer_refuses_a_sequence_that_would_change_its_neighbours(folder):
    policy = PolicyModel(load_network(folder, torch.float64), chunk_tokens=16)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        policy(pack([sequence(rng.integers(0, 97, length)) for length in (FIXED, 9)], "cpu"), 1.0)
    too_long = pack([sequence(rng.integers(0, 97, length)) for length in (FIXED + 1, 9)], "cpu")
    with pytest.raises(TrainerError, match=f"a sequence has {FIXED + 1} tokens, but beyond {FIXED} the rotary"):
        policy(too_long, 1.0)
