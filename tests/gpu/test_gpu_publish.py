"""Weights from a trainer on the device to an engine on it: receipts, and tokens of the version that they prove."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from agentrl.inference.checksum import checksum_key
from agentrl.inference.client import EngineClient
from agentrl.inference.fleet import Fleet
from agentrl.protocols import WeightTransport
from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig, TensorTransportConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.tensors import TensorTransport
from tests.storms.gpu_workload import (
    FIRST,
    TINY,
    all_selected,
    at,
    batch_of,
    draw_ids,
    draw_replies,
    made_batch,
    plain,
    plain_logprobs,
    trainer_config,
    trainer_rank,
    trajectory_of,
)

pytestmark = pytest.mark.long

LOAD_S = 60.0
# A few tensors in each, so that there are several.
BUCKET_BYTES = 100_000
SECOND, THIRD = PolicyVersion(0, 1), PolicyVersion(0, 2)


def transport_of(kind: str, device: str, logs: Path) -> WeightTransport:
    """By disk, through memory that processes share, or through that of the device."""
    if kind == "disk":
        return DiskTransport()
    place = "cuda:0" if kind == "device" and device == "cuda" else "cpu"
    config = TensorTransportConfig(device=place, bucket_bytes=BUCKET_BYTES)
    return TensorTransport(config, LOAD_S, logs)


async def publish(
    engine: EngineClient, transport: WeightTransport, manifests: list[WeightsManifest], max_gap_nats: float
) -> list[Receipt]:
    """One version after the other; fails with what the fleet says if the engine does not take one."""
    first = WeightsManifest("main", FIRST, "/no/first/weights", {}, 0)
    fleet = Fleet([engine], FIRST)
    publisher = StagedPublisher(fleet, transport, PublishConfig(max_canary_gap_nats=max_gap_nats), first)
    receipts = []
    try:
        for manifest in manifests:
            receipts += await publisher.publish(manifest)
    finally:
        await publisher.close()
    return receipts


@pytest.mark.parametrize("kind", ["disk", "host", "device"])
async def test_what_the_trainer_steps_to_is_what_the_engine_serves(
    kind: str, engine: EngineClient, dtype: str, gpu_model: Path, device: str, bounds: dict[str, float], tmp_path: Path
) -> None:
    batch = made_batch(gpu_model, TINY, count=8)
    config = trainer_config(device, dtype, rate=20.0, max_gap_nats=bounds[dtype])
    with trainer_rank(gpu_model, tmp_path / "rank", config) as rank:
        rank.step(batch)
        second = rank.stage(SECOND, str(tmp_path / "second"))
        rank.supervised_step([all_selected(ids) for ids in draw_ids(TINY, 2, 20, seed=4)], 1.0)
        third = dataclasses.replace(rank.stage(SECOND, str(tmp_path / "third")), version=THIRD)
        receipts = await publish(engine, transport_of(kind, device, tmp_path), [second, third], bounds[dtype])
        assert [receipt.version for receipt in receipts] == [SECOND, THIRD]
        for receipt, manifest in zip(receipts, (second, third), strict=True):
            names = [name for name in manifest.checksums if ":" not in name]
            assert len(receipt.checksums) == len(names) > 20
            keys = [checksum_key(dtype, name) for name in names]
            assert {key: receipt.checksums[key] for key in keys} == {key: manifest.checksums[key] for key in keys}
        prompts = draw_ids(TINY, 4, 12, seed=9)
        replies = await draw_replies(engine, prompts, 100)
        assert {span.version for reply in replies for span in reply.versions} == {THIRD}
        fresh = batch_of([trajectory_of(p, r) for p, r in zip(prompts, replies, strict=True)])
        gap = rank.step(at(fresh, SECOND)).metrics["trainer/fresh_gap_max_nats"]
    assert gap < bounds[dtype]
    old, new = plain(gpu_model), plain(Path(third.path))
    pairs = list(zip(prompts, replies, strict=True))
    assert max(np.abs(plain_logprobs(new, p, r.token_ids) - r.logprobs).max() for p, r in pairs) < bounds[dtype]
    assert max(np.abs(plain_logprobs(old, p, r.token_ids) - r.logprobs).max() for p, r in pairs) > 4 * bounds[dtype]
