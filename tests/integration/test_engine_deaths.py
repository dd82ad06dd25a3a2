"""What a client should never send: some servers refuse it, others end; none runs code that it is sent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_server import EngineCalls, generate_body, pickled
from safetensors.torch import load_file

pytestmark = pytest.mark.long


class _RunsCode:
    def __init__(self, witness: Path) -> None:
        self._witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._witness}",)


def _malformed(case: str, witness: Path) -> tuple[str, dict[str, Any]]:
    """Path and body of a call."""
    if case == "unknown token":
        return "/generate", generate_body([10**6], max_new_tokens=1)
    value = torch.zeros(2, 2) if case == "wrong shape" else _RunsCode(witness)
    return "/update_weights_from_tensor", {"serialized_named_tensors": [pickled([("model.norm.weight", value)])]}


async def _status(engine: EngineCalls, path: str, body: dict[str, Any]) -> int | None:
    """How a call is answered; None if the connection ends instead."""
    try:
        return (await engine.post(path, **body)).status_code
    except httpx.TransportError:
        return None


async def _is_up(engine: EngineCalls) -> bool:
    try:
        return (await engine.http.get("/model_info", timeout=5.0)).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("case", ["unknown token", "wrong shape", "code"])
async def test_malformed_input_is_refused_or_ends_the_server(
    expendable: EngineCalls, case: str, tmp_path: Path
) -> None:
    witness = tmp_path / "code-was-run"
    path, body = _malformed(case, witness)
    await expendable.ok("/pause_generation", mode="abort")
    await expendable.ok("/begin_weight_update")
    if case == "unknown token":
        await expendable.ok("/end_weight_update")
        await expendable.ok("/continue_generation")
    status = await _status(expendable, path, body)
    if expendable.server.traits.survives_malformed_input:
        assert status == 400
        assert (await expendable.info())["weight_version"] == "0.0"
    else:
        assert status is None
        await _wait_for_the_end(expendable)
    assert not witness.exists()


async def test_one_payload_of_tensors_is_enough_for_a_server_without_shards_and_ends_one_with_two(
    expendable_shards: EngineCalls,
) -> None:
    tensors = list(load_file(expendable_shards.server.other_model / "model.safetensors").items())
    await expendable_shards.ok("/pause_generation", mode="abort")
    await expendable_shards.ok("/begin_weight_update")
    body = {"serialized_named_tensors": [pickled(tensors)], "weight_version": "0.1"}
    status = await _status(expendable_shards, "/update_weights_from_tensor", body)
    if expendable_shards.server.traits.wants_a_payload_for_each_shard:
        assert status is None
        await _wait_for_the_end(expendable_shards)
    else:
        assert status == 200


async def _wait_for_the_end(engine: EngineCalls) -> None:
    async with asyncio.timeout(60):
        while await _is_up(engine):
            await asyncio.sleep(0.1)
