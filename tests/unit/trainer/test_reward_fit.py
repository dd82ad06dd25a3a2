from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from agentrl.trainer.reward_fit import FitOptions, FitQuality, LabelledContext, fit_reward_model
from agentrl.types.errors import ConfigError

GOOD, BAD = 40, 41


def contexts(count: int, seed: int) -> list[LabelledContext]:
    """Contexts in which a state is worth 1 once the token GOOD has come, and 0 once BAD has."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        length = int(rng.integers(12, 30))
        ids = rng.integers(50, 280, length).astype(np.int32)
        place = int(rng.integers(1, 8))
        ids[place] = GOOD if number % 2 else BAD
        positions = np.array([place, length - 1])
        made.append(LabelledContext(ids, positions, np.full(2, number % 2, np.float32)))
    return made


def test_a_fitted_model_tells_unseen_states_apart_and_transformers_loads_it(tiny_model: Path, tmp_path: Path) -> None:
    train, check = contexts(192, 0), contexts(48, 1)
    options = FitOptions(passes=5, contexts_per_step=16, learning_rate=3e-3, threads=1)
    quality = fit_reward_model(tiny_model, train, check, options, tmp_path / "prm")
    network, loaded = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "prm", dtype=torch.float32, output_loading_info=True
    )
    assert not loaded["missing_keys"]
    with torch.no_grad():
        values = np.concatenate(
            [network.eval()(torch.tensor(c.token_ids[None].astype(int))).logits[0, c.positions, 0] for c in check]
        )
    labels = np.concatenate([c.labels for c in check])
    assert quality.auc > 0.95
    assert quality.correlation == pytest.approx(np.corrcoef(values, labels)[0, 1], abs=1e-4)
    assert quality.error == pytest.approx(np.mean((values - labels) ** 2), abs=1e-5)
    assert (tmp_path / "prm" / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


def test_the_same_seed_fits_the_same_model(tiny_model: Path, tmp_path: Path) -> None:
    options = FitOptions(passes=1, contexts_per_step=8, threads=1)
    for name in ("a", "b"):
        fit_reward_model(tiny_model, contexts(16, 0), contexts(8, 1), options, tmp_path / name)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_a_fit_that_only_gets_worse_keeps_the_mean_it_began_with(tiny_model: Path, tmp_path: Path) -> None:
    """Labels of the unseen contexts are turned round: whatever is learned is wrong there."""
    turned = [LabelledContext(c.token_ids, c.positions, 1 - c.labels) for c in contexts(32, 1)]
    options = FitOptions(passes=4, contexts_per_step=16, learning_rate=3e-3, threads=1)
    quality = fit_reward_model(tiny_model, contexts(192, 0), turned, options, tmp_path / "prm")
    assert quality.error <= 0.25 + 1e-6
    assert math.isnan(quality.correlation) or quality.error < 0.25


def test_quality_is_that_of_counting_pairs() -> None:
    rng = np.random.default_rng(3)
    values, labels = rng.integers(0, 6, 60) / 5, rng.integers(0, 2, 60).astype(float)
    pairs = [(a, b) for a in values[labels == 1] for b in values[labels == 0]]
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    quality = FitQuality.of(values, labels)
    assert quality.auc == pytest.approx(expected)
    assert quality.variance == pytest.approx(np.var(labels))
    assert quality.states == 60


def test_quality_of_labels_that_are_all_alike_is_not_a_number() -> None:
    quality = FitQuality.of(np.array([0.1, 0.9]), np.array([1.0, 1.0]))
    assert math.isnan(quality.auc)
    assert math.isnan(quality.correlation)


def test_a_folder_that_is_no_decoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot become a reward model"):
        fit_reward_model(tmp_path, contexts(4, 0), contexts(4, 1), FitOptions(), tmp_path / "prm")
