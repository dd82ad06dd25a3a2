"""A model spread over two processes: what arrives must arrive at both."""

from __future__ import annotations

import asyncio

import pytest
import torch
from broadcast import join_as_sender, send
from engine_server import EngineCalls, Reference, logprobs_of, pickled, spans_of
from flattened import flatten
from safetensors.torch import load_file
from torch.distributed import destroy_process_group

from agentrl.process.ports import free_port

PROMPT = [20, 31, 42, 53, 64, 75, 86]


async def _serves_others(engine: EngineCalls, reference: Reference) -> None:
    answer = await engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert spans_of(answer) == [("0.1", 0, 20)]
    expected = reference.sampled(engine.server.other_model, PROMPT, answer["output_ids"])
    assert logprobs_of(answer) == pytest.approx(expected, abs=1e-3)


async def test_weights_from_disk_reach_every_shard(sharded_engine: EngineCalls, reference: Reference) -> None:
    await sharded_engine.load(sharded_engine.server.other_model, "0.1")
    await _serves_others(sharded_engine, reference)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_tensors_are_sent_once_for_each_shard(
    sharded_engine: EngineCalls, reference: Reference, load_format: str | None
) -> None:
    tensors = list(load_file(sharded_engine.server.other_model / "model.safetensors").items())
    payload = flatten(tensors) if load_format else pickled(tensors)
    await sharded_engine.ok("/pause_generation", mode="abort")
    await sharded_engine.ok("/begin_weight_update")
    body = {"serialized_named_tensors": [payload] * 2, "load_format": load_format, "weight_version": "0.1"}
    await sharded_engine.ok("/update_weights_from_tensor", **body)
    await sharded_engine.ok("/end_weight_update")
    await sharded_engine.ok("/continue_generation")
    await _serves_others(sharded_engine, reference)


async def test_each_shard_has_digests_of_its_own(sharded_engine: EngineCalls) -> None:
    first, second = (await sharded_engine.ok("/weights_checker", action="checksum"))["ranks"]
    name = "model.layers.0.self_attn.o_proj.weight"
    assert first["checksums"].keys() == second["checksums"].keys()
    assert first["checksums"][name] != second["checksums"][name]
    assert first["checksums"]["model.norm.weight"] == second["checksums"]["model.norm.weight"]


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_a_broadcast_reaches_every_shard(
    sharded_engine: EngineCalls, reference: Reference, load_format: str | None
) -> None:
    tensors = load_file(sharded_engine.server.other_model / "model.safetensors")
    pieces = list(tensors.values())
    if load_format:
        pieces = [torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in pieces])]
    port, name = free_port(), f"broadcast-{load_format}"
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
    joined = asyncio.create_task(
        sharded_engine.ok("/init_weights_update_group", group_name=name, backend="gloo", **place)
    )
    group = await asyncio.to_thread(join_as_sender, port, 3, name)
    await joined
    await sharded_engine.ok("/pause_generation", mode="abort")
    await sharded_engine.ok("/begin_weight_update")
    what = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    update = asyncio.create_task(
        sharded_engine.ok(
            "/update_weights_from_distributed",
            group_name=name,
            weight_version="0.1",
            load_format=load_format,
            **what,
        )
    )
    await asyncio.to_thread(send, group, pieces)
    await update
    await sharded_engine.ok("/end_weight_update")
    await sharded_engine.ok("/continue_generation")
    await _serves_others(sharded_engine, reference)
    await sharded_engine.ok("/destroy_weights_update_group", group_name=name)
    assert (await sharded_engine.post("/destroy_weights_update_group", group_name=name)).status_code == 400
    destroy_process_group(group)
