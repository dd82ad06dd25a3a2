"""The benchmark of a GPU runs through on the device with a tiny model, and counts operations as PyTorch does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks import gpu
from tests.storms.gpu_workload import TINY, plain

TINY_SIZE = gpu.SIZES["tiny"]


@pytest.mark.parametrize("part", ["device", "trainer_bfloat16", "trainer_checkpointed", "trainer_long"])
def test_a_part_that_starts_no_engine_has_its_figures(part: str, device: str, tmp_path: Path) -> None:
    figures = gpu.PARTS[part](device, TINY_SIZE, tmp_path)
    assert json.loads(json.dumps(figures)) == figures
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    assert all(value > 0 for value in numbers.values())
    assert {"tokens_per_s", "step_s"} <= numbers.keys() or "measured_flops" in numbers


@pytest.mark.long
def test_the_parts_with_an_engine_have_their_figures(device: str, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "publish").mkdir()
    engine = gpu.PARTS["engine"](device, TINY_SIZE, tmp_path / "engine")
    assert set(engine["decode_tokens_per_s"]) == {"1", "2"}
    assert min(engine["prefill_tokens_per_s"], *engine["decode_tokens_per_s"].values()) > 0
    publish = gpu.PARTS["publish"](device, TINY_SIZE, tmp_path / "publish")
    assert set(publish["transports"]) == {"disk", "host"} | ({"device"} if device == "cuda" else set())
    assert all(figures["seconds"] > figures["gap_s"] > 0 for figures in publish["transports"].values())
    assert publish["fresh_tokens"] == 16 * 2 * TINY_SIZE.reply
    assert 0 < publish["gap_mean_nats"] < publish["gap_max_nats"] < 0.5


@pytest.mark.long
def test_a_part_that_fails_is_named_and_costs_no_other(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.run_part("device", device, "tiny")["measured_flops"] > 0
    assert "invalid choice" in gpu.run_part("no such part", device, "tiny")["error"]
    monkeypatch.setattr(gpu, "PART_S", 0.01)
    assert gpu.run_part("device", device, "tiny") == {"error": "took longer than 0.01 s"}


@pytest.mark.parametrize("shape", [TINY, dataclasses.replace(TINY, is_tied=True, key_heads=4, layers=3)])
def test_operations_of_a_step_are_those_that_pytorch_counts(shape, tmp_path):
    lengths = [40, 24]
    network = plain(gpu.make_model(tmp_path / "model", shape, "cpu"))
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            network(torch.randint(0, shape.vocabulary, (1, length))).logits.sum().backward()
    # Counted are all scores of a square; a causal kernel computes half of them.
    squares = 6 * shape.layers * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
    rotations = shape.layers * 0
    assert counter.get_total_flops() == pytest.approx(shape.step_flops(lengths) + squares + rotations, rel=2e-3)


def test_the_share_of_the_peak_says_what_the_peak_is():
    trained = {"model_flops_per_s": 200e12}
    known = {
        "bytes": 80 << 30,
        "measured_flops": 700e12,
        "data_sheet_flops": gpu.data_sheet_flops("NVIDIA H100 80GB HBM3"),
    }
    found = gpu.add_mfu({"device": known, "trainer": trained, "engine": {"bytes": 1}})
    assert found["trainer"]["mfu"] == pytest.approx(200 / 989)
    assert found["trainer"]["peak_of"] == "data sheet"
    assert found["engine"] == {"bytes": 1}
    unknown = known | {"data_sheet_flops": gpu.data_sheet_flops("A GPU of tomorrow")}
    assert gpu.add_mfu({"device": unknown, "trainer": trained})["trainer"]["mfu"] == pytest.approx(2 / 7)
    assert gpu.add_mfu({"device": known | {"bytes": None}, "trainer": trained})["trainer"]["mfu"] is None
    assert gpu.data_sheet_flops("NVIDIA L40S") == 362e12
    assert gpu.data_sheet_flops("NVIDIA H100 PCIe") == 756e12
