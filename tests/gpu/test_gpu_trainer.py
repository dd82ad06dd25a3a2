"""A trainer of one rank on the device, held against plain transformers on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.trainer.config import LoraConfig
from agentrl.trainer.rank import TrainerRank
from agentrl.types.batch import TrainBatch
from agentrl.types.errors import TrainerError
from agentrl.types.version import PolicyVersion
from tests.storms.gpu_workload import (
    FIRST,
    TINY,
    all_selected,
    at,
    draw_ids,
    guessed_batch,
    made_batch,
    peak_bytes,
    plain,
    reset_peak,
    trainer_config,
    trainer_rank,
)

Weights = dict[str, torch.Tensor]
RATE = 0.05
SECOND, THIRD = PolicyVersion(0, 1), PolicyVersion(0, 2)


@pytest.fixture(scope="module")
def batch(gpu_model: Path) -> TrainBatch:
    """Replies whose log-probabilities plain transformers computed on the CPU in float32."""
    return made_batch(gpu_model, TINY, count=8)


def staged(rank: TrainerRank, version: PolicyVersion, folder: Path) -> Weights:
    return load_file(Path(rank.stage(version, str(folder)).path) / "model.safetensors")


def distance(weights: Weights, others: Weights) -> float:
    """Euclidean, over all values."""
    return float(torch.stack([(weights[name] - others[name]).norm() for name in weights]).norm())


def plain_step(model: Path, texts: list[np.ndarray]) -> tuple[float, Weights]:
    """Negative log-likelihood of texts in nats, and the weights after a step of gradient descent on its mean."""
    network = plain(model, torch.float64)
    losses = []
    for ids in texts:
        row = torch.from_numpy(ids.astype(np.int64))
        table_TV = network(row[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-table_TV.gather(1, row[1:, None]).sum())
    nll = torch.stack(losses).sum()
    names, parameters = zip(*network.named_parameters(), strict=True)
    gradients = torch.autograd.grad(nll / sum(len(ids) - 1 for ids in texts), parameters)
    moved = [parameter.detach() - RATE * gradient for parameter, gradient in zip(parameters, gradients, strict=True)]
    return nll.item(), {name: tensor.float() for name, tensor in zip(names, moved, strict=True)}


def test_a_step_in_float32_makes_the_weights_of_float64_on_a_cpu(gpu_model, device, tmp_path):
    texts = [*draw_ids(TINY, 3, 30, seed=5), *draw_ids(TINY, 2, 17, seed=6)]
    nll, expected = plain_step(gpu_model, texts)
    with trainer_rank(gpu_model, tmp_path / "rank", trainer_config(device, rate=RATE)) as rank:
        before = staged(rank, FIRST, tmp_path / "before")
        assert rank.supervised_step([all_selected(ids) for ids in texts], 1.0) == pytest.approx(nll, rel=1e-6)
        after = staged(rank, FIRST, tmp_path / "after")
    assert distance(expected, before) > 1e-2
    assert distance(after, expected) < 1e-3 * distance(expected, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "lora"])
def test_a_step_passes_the_gate_against_log_probabilities_of_a_cpu(
    dtype, lora, gpu_model, device, batch, bounds, tmp_path
):
    config = trainer_config(device, dtype, max_gap_nats=bounds[dtype], lora=lora)
    with trainer_rank(gpu_model, tmp_path / "rank", config) as rank:
        before = staged(rank, FIRST, tmp_path / "before") if lora is None else {}
        metrics = rank.step(batch).metrics
        after = staged(rank, SECOND, tmp_path / "after") if lora is None else {}
    assert metrics["trainer/fresh_tokens"] == 8 * 40
    assert metrics["trainer/grad_norm"] > 0
    gap = metrics["trainer/fresh_gap_max_nats"]
    assert gap < bounds[dtype]
    assert dtype == "float32" or gap > bounds["float32"], "bfloat16 that is as exact as float32 was not computed in it"
    assert lora is not None or distance(after, before) > 1e-4


def test_the_gate_stops_a_step_whose_log_probabilities_are_wrong(gpu_model, device, tmp_path):
    config = trainer_config(device, "bfloat16", max_gap_nats=0.5)
    with (
        trainer_rank(gpu_model, tmp_path / "rank", config) as rank,
        pytest.raises(TrainerError, match=r"disagree|differ|max_gap_nats"),
    ):
        rank.step(guessed_batch(TINY, 8, 48, FIRST))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_what_was_saved(dtype, gpu_model, device, batch, bounds, tmp_path):
    config = trainer_config(device, dtype, kind="adamw", rate=1e-3, max_gap_nats=20 * bounds["bfloat16"])
    with trainer_rank(gpu_model, tmp_path / "rank", config) as rank:
        rank.step(batch)
        rank.save(str(tmp_path / "saved"))
        start = staged(rank, SECOND, tmp_path / "start")
        rank.step(at(batch, SECOND))
        expected = staged(rank, THIRD, tmp_path / "expected")
    with trainer_rank(gpu_model, tmp_path / "rank", config) as rank:
        rank.restore(str(tmp_path / "saved"))
        rank.step(at(batch, FIRST))
        restored = staged(rank, SECOND, tmp_path / "restored")
    with trainer_rank(tmp_path / "saved", tmp_path / "rank", config) as rank:
        rank.step(at(batch, FIRST))
        forgetful = staged(rank, SECOND, tmp_path / "forgetful")
    # Sums on a GPU have no fixed order, and Adam makes a full step of a gradient that is nearly zero.
    step = distance(expected, start)
    assert distance(restored, expected) < 0.02 * step
    assert distance(forgetful, expected) > 0.1 * step


def test_checkpointed_activations_change_the_memory_and_not_the_step(gpu_model, device, tmp_path):
    batch = guessed_batch(TINY, 8, 512, FIRST)
    metrics, peaks = [], []
    for is_on in (False, True):
        config = trainer_config(device, max_gap_nats=100.0, activation_checkpointing=is_on)
        with trainer_rank(gpu_model, tmp_path / "rank", config) as rank:
            reset_peak(device)
            metrics.append(copy.deepcopy(rank.step(batch).metrics))
            peaks.append(peak_bytes(device))
    for name in ("trainer/loss", "trainer/grad_norm", "trainer/fresh_gap_mean_nats"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name
    whole, checkpointed = peaks
    assert whole is None or checkpointed < whole
