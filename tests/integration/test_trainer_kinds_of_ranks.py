"""Two ranks do what one does: of a model of experts with routing replay and checkpointing, and with adapters."""

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
from agentrl.trainer.config import LoraConfig, OptimizerConfig, TrainerConfig
from agentrl.trainer.handle import TrainerHandle
from agentrl.trainer.rank import RankSpec, TrainerRank
from agentrl.types.batch import StepReport, TrainBatch, TrainEpisode, TrainTrajectory, WeightsManifest
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion

pytestmark = pytest.mark.long

Weights = dict[str, torch.Tensor]
V0, V1, V2 = (PolicyVersion(0, step) for step in range(3))
ALGORITHM = AlgorithmConfig()
REPLIES = ([(3, 0), (2, 0)], [(6, 0)], [(1, 0), (1, 0), (4, 0)], [(5, 0)], [(2, 0)])
PLAIN = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-3),
    micro_batch_tokens=24,
    max_gap_nats=100.0,
    gap_report_interval_steps=1,
)
KINDS = {
    "experts": PLAIN.model_copy(update={"activation_checkpointing": True}),
    "adapters": PLAIN.model_copy(update={"lora": LoraConfig(rank=3)}),
}


def batch_of(version: PolicyVersion) -> TrainBatch:
    """Episodes whose tokens used experts that were drawn at random."""
    rng = np.random.default_rng(version.step)
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
    return TrainBatch("main", version, tuple(episodes))


def staged(manifest: WeightsManifest) -> Weights:
    file = {"full": "model.safetensors", "adapter": "adapter_model.safetensors"}[manifest.kind]
    return load_file(Path(manifest.path) / file)


async def two_ranks(model: Path, folder: Path, config: TrainerConfig) -> tuple[list[StepReport], Weights, Weights]:
    """Two steps; and the second again, by other processes, from the checkpoint between them."""
    config = config.model_copy(update={"ranks": 2})
    handle = await TrainerHandle.start("main", model, V0, config, ALGORITHM, 1.0, folder)
    try:
        reports = [await handle.step(batch_of(V0))]
        await handle.save(folder / "checkpoint")
        reports.append(await handle.step(batch_of(V1)))
        weights = staged(await handle.stage(V2, folder / "two"))
    finally:
        await handle.close()
    handle = await TrainerHandle.start("main", model, V1, config, ALGORITHM, 1.0, folder)
    try:
        await handle.restore(folder / "checkpoint")
        await handle.step(batch_of(V1))
        return reports, weights, staged(await handle.stage(V2, folder / "continued"))
    finally:
        await handle.close()


def one_rank(model: Path, folder: Path, config: TrainerConfig) -> tuple[list[StepReport], Weights, Weights]:
    """The weights before and after two steps."""
    settings = config.model_dump(), ALGORITHM.model_dump()
    rank = TrainerRank(RankSpec("main", str(model), V0, 0, 1, str(folder / "rendezvous"), 1.0, *settings))
    rank.load()
    try:
        start = staged(rank.stage(V0, str(folder / "start")))
        reports = [rank.step(batch_of(version)) for version in (V0, V1)]
        return reports, start, staged(rank.stage(V2, str(folder / "one")))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_do_what_one_does_and_go_on_from_a_checkpoint_to_the_last_bit(kind, tmp_path):
    model = make_tiny_moe_model(tmp_path / "model")
    theirs, weights, continued = asyncio.run(two_ranks(model, tmp_path, KINDS[kind]))
    mine, start, expected = one_rank(model, tmp_path, KINDS[kind])
    for their, my in zip(theirs, mine, strict=True):
        names = [name for name in my.metrics if not name.startswith("time/") and not name.endswith("_per_s")]
        assert {"trainer/replayed_fraction", "trainer/fresh_gap_max_no_replay_nats"} <= set(names)
        for name in names:
            assert their.metrics[name] == pytest.approx(my.metrics[name], rel=1e-4, abs=1e-5), name
        assert my.metrics["trainer/replayed_fraction"] > 0.8
    assert weights.keys() == expected.keys() == continued.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(continued[name], weights[name]), name
    moved = {"experts": "model.layers.1.mlp.gate.weight"}
    name = moved.get(kind, "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight")
    assert float((expected[name] - start[name]).abs().max()) > 1e-4
