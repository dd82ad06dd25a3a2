"""Two ranks of a model of experts, with routing replay and activation checkpointing, do what one does."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.testing.tiny_moe import make_tiny_moe_model
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.handle import TrainerHandle
from agentrl.trainer.rank import RankSpec, TrainerRank
from agentrl.types.batch import StepReport, TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion

FIRST = PolicyVersion(0, 0)
ALGORITHM = AlgorithmConfig()
REPLIES = ([(3, 0), (2, 0)], [(6, 0)], [(1, 0), (1, 0), (4, 0)], [(5, 0)], [(2, 0)])


def config_of(ranks: int) -> TrainerConfig:
    return TrainerConfig(
        ranks=ranks,
        optimizer=OptimizerConfig(kind="sgd", learning_rate=0.5, momentum=0.0, max_grad_norm=100.0),
        micro_batch_tokens=24,
        activation_checkpointing=True,
        max_gap_nats=100.0,
        gap_report_interval_steps=1,
    )


def batch_of_routed() -> TrainBatch:
    """Episodes whose tokens used experts that were drawn at random."""
    rng = np.random.default_rng(0)
    episodes = []
    for number, replies in enumerate(REPLIES):
        (built,) = build_trajectories(build_episode(build_ticket(), replies))
        length = len(built.token_ids)
        draws = [rng.choice(8, 2, replace=False) for _ in range(2 * length)]
        experts = np.asarray(draws, np.int16).reshape(length, 2, 2)
        experts[-1] = -1
        trajectory = dataclasses.replace(
            built,
            token_ids=rng.integers(0, 300, length).astype(np.int32),
            logprobs=np.where(built.sampled, -5.7, 0).astype(np.float32),
            routed_experts=experts,
        )
        trained = TrainTrajectory(trajectory, built.sampled, np.zeros(length, np.int32))
        episodes.append(TrainEpisode(f"e{number}", 0, float(number % 2), (trained,)))
    return TrainBatch("main", FIRST, tuple(episodes))


async def two_ranks(model: Path, folder: Path, batch: TrainBatch) -> tuple[StepReport, dict[str, torch.Tensor]]:
    handle = await TrainerHandle.start("main", model, FIRST, config_of(2), ALGORITHM, 1.0, folder)
    try:
        report = await handle.step(batch)
        await handle.stage(report.version, folder / "two")
    finally:
        await handle.close()
    return report, load_file(folder / "two" / "model.safetensors")


def one_rank(model: Path, folder: Path, batch: TrainBatch) -> tuple[StepReport, dict[str, torch.Tensor]]:
    settings = config_of(1).model_dump(), ALGORITHM.model_dump()
    rank = TrainerRank(RankSpec("main", str(model), FIRST, 0, 1, str(folder / "rendezvous"), 1.0, *settings))
    rank.load()
    try:
        report = rank.step(batch)
        rank.stage(report.version, str(folder / "one"))
    finally:
        dist.destroy_process_group()
    return report, load_file(folder / "one" / "model.safetensors")


def test_two_ranks_replay_experts_as_one_does(tmp_path):
    model, batch = make_tiny_moe_model(tmp_path / "model"), batch_of_routed()
    theirs, weights = asyncio.run(two_ranks(model, tmp_path, batch))
    mine, expected = one_rank(model, tmp_path, batch)
    names = [name for name in mine.metrics if not name.startswith("time/") and not name.endswith("_per_s")]
    assert {"trainer/replayed_fraction", "trainer/fresh_gap_max_no_replay_nats"} <= set(names)
    for name in names:
        assert theirs.metrics[name] == pytest.approx(mine.metrics[name], rel=1e-4, abs=1e-5), name
    assert mine.metrics["trainer/replayed_fraction"] > 0.8
    start = load_file(model / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    router = "model.layers.1.mlp.gate.weight"
    assert float((expected[router] - start[router]).abs().max()) > 1e-3
