"""An embedded engine on the device, held against plain transformers on the CPU and a trainer on the same device."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.testing.tiny_moe import NUM_LAYERS, TOP_K, make_tiny_moe_model
from agentrl.types.errors import ConfigError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import FolderWeights
from tests.storms.gpu_workload import (
    NO_STOP,
    TINY,
    batch_of,
    draw_ids,
    draw_replies,
    plain,
    plain_logprobs,
    request_of,
    start_engine,
    trainer_config,
    trainer_rank,
    trajectory_of,
    used_bytes,
)

pytestmark = pytest.mark.long

NUM_ABORTS = 4
KV_ROWS, KV_TOKENS = 64, 4096


@pytest.fixture(scope="module")
def network(gpu_model: Path) -> PreTrainedModel:
    return plain(gpu_model)


async def continued(engine: EngineClient, prompt: np.ndarray, num_tokens: int, seed: int) -> list[Generation]:
    """Generate as a session does: what is aborted goes on from its tokens."""
    parts: list[Generation] = []
    ids = prompt
    while (missing := len(prompt) + num_tokens - len(ids)) > 0:
        rid = f"continued-{seed:04d}-{len(parts):04d}"
        parts.append(await engine.generate(request_of(rid, ids, missing, seed)))
        ids = np.concatenate([ids, parts[-1].token_ids])
    return parts


async def tell(engine: EngineClient, path: str) -> None:
    """A call whose answer is empty."""
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=60.0) as http:
        (await http.post(path, json={})).raise_for_status()


async def abort_often(engine: EngineClient, sessions: asyncio.Future[object]) -> int:
    """Abort what is under way again and again; returns how many replies were cut."""
    cut = 0
    while cut < NUM_ABORTS and not sessions.done():
        await asyncio.sleep(0)
        if (await engine.model_info())["num_running"]:
            cut += await engine.pause()
            await engine.resume()
    return cut


async def test_the_engine_draws_from_the_models_distribution_aborted_or_not(
    engine: EngineClient, dtype: str, network: PreTrainedModel, bounds: dict[str, float]
) -> None:
    prompts = draw_ids(TINY, 4, 12, seed=3)
    whole = await draw_replies(engine, prompts, 400)
    sessions = asyncio.gather(*(continued(engine, prompt, 400, n) for n, prompt in enumerate(prompts)))
    cut = await abort_often(engine, sessions)
    played = await sessions
    assert cut >= NUM_ABORTS
    assert any(part.finish is FinishReason.ABORT and len(part.token_ids) for parts in played for part in parts)
    for prompt, parts in [*zip(prompts, ([reply] for reply in whole), strict=True), *zip(prompts, played, strict=True)]:
        ids = np.concatenate([part.token_ids for part in parts])
        logprobs = np.concatenate([part.logprobs for part in parts])
        assert len(ids) == len(logprobs) == 400
        assert np.abs(plain_logprobs(network, prompt, ids) - logprobs).max() < bounds[dtype]
    scores = await engine.score(prompts[0].tolist())
    expected = plain_logprobs(network, prompts[0][:1], prompts[0][1:])
    assert np.abs(np.asarray(scores) - expected).max() < bounds[dtype]
    if dtype == "float32":
        pairs = zip(whole, played, strict=True)
        same = [np.concatenate([p.token_ids for p in parts]).tolist() == one.token_ids.tolist() for one, parts in pairs]
        assert sum(same) >= 3, "a token's random number depends on its position alone, an abort does not change it"


async def test_trainer_and_engine_on_one_device_agree_within_the_documented_bound(
    engine: EngineClient, dtype: str, gpu_model: Path, device: str, bounds: dict[str, float], tmp_path: Path
) -> None:
    prompts = draw_ids(TINY, 8, 20, seed=7)
    replies = await draw_replies(engine, prompts, 200)
    batch = batch_of([trajectory_of(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)])
    config = trainer_config(device, dtype, max_gap_nats=bounds[dtype])
    with trainer_rank(gpu_model, tmp_path / "rank", config) as rank:
        metrics = rank.step(batch).metrics
    assert metrics["trainer/fresh_tokens"] == 8 * 200
    assert 0 < metrics["trainer/fresh_gap_mean_nats"] < bounds[dtype] / 5


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
async def test_released_memory_is_free_for_others_and_comes_back(
    engine: EngineClient, gpu_model: Path, device: str
) -> None:
    prompts = draw_ids(TINY, KV_ROWS, 16, seed=1)
    # A context that is long in one row makes the KV cache long in all of them.
    long = draw_ids(TINY, 1, KV_TOKENS, seed=2)[0]
    await engine.generate(request_of("long-0000", long, 4, 0))
    before = used_bytes(device)
    await engine.pause()
    await tell(engine, "/release_memory_occupation")
    after = used_bytes(device)
    kv_bytes = 2 * TINY.layers * KV_ROWS * TINY.key_heads * TINY.head_dim * KV_TOKENS * torch.bfloat16.itemsize
    assert before is None or after is None or before - after > kv_bytes / 2
    await tell(engine, "/resume_memory_occupation")
    await engine.swap(FolderWeights(str(gpu_model)), PolicyVersion(0, 1))
    await engine.resume()
    replies = await draw_replies(engine, prompts, 8)
    assert {span.version for reply in replies for span in reply.versions} == {PolicyVersion(0, 1)}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_experts_are_replayed_on_the_device(
    precision: str, device: str, bounds: dict[str, float], tmp_path: Path
) -> None:
    model = make_tiny_moe_model(tmp_path / "moe")
    process = await start_engine(model, tmp_path, device, precision)
    sampling = Sampling(top_k=20, top_p=0.9, routing=(NUM_LAYERS, TOP_K))
    prompts = [np.arange(20 + n, 30 + n, dtype=np.int32) for n in range(4)]
    names = [f"moe-{number:04d}" for number in range(len(prompts))]
    requests = [
        GenerationRequest(name, name, prompt, 60, NO_STOP, sampling, seed)
        for seed, (name, prompt) in enumerate(zip(names, prompts, strict=True))
    ]
    try:
        replies = await asyncio.gather(*(process.client.generate(request) for request in requests))
    finally:
        await process.close()
    batch = batch_of([trajectory_of(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)])
    config = trainer_config(device, precision, max_gap_nats=2.0, gap_report_interval_steps=1)
    with trainer_rank(model, tmp_path / "rank", config) as rank:
        metrics = rank.step(batch).metrics
    assert metrics["trainer/replayed_fraction"] > 0.9
    assert metrics["trainer/fresh_gap_mean_nats"] < bounds[precision] / 5
    assert metrics["trainer/fresh_gap_mean_no_replay_nats"] > 10 * metrics["trainer/fresh_gap_mean_nats"]


async def test_a_device_that_is_not_there_ends_the_start_with_its_name(gpu_model: Path, tmp_path: Path) -> None:
    config = EmbeddedEngineConfig(args={"device": "cuda:99"})
    launch = EngineLaunch("main", "engine", gpu_model, PolicyVersion(0, 0), config, False, tmp_path)
    with pytest.raises(ConfigError, match=r"--device cuda:99: torch .* finds \d+ CUDA devices"):
        await EngineProcess.start(launch, ClientConfig(), LocalPlace())
