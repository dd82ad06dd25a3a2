from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.engine.memory import MemoryRoutes
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError, DrawParams, Request
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.slots import KVCache
from agentrl.engine.weights import WeightStore


@pytest.fixture
def model(tiny_model: Path) -> ServedModel:
    return ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=2))


def test_a_released_cache_holds_no_byte_and_grows_again() -> None:
    cache = KVCache(3, 4, 2, 8, torch.float32, "cpu")
    cache.reserve(300)
    before = cache.num_bytes
    assert before >= 3 * 2 * 4 * 2 * 300 * 8 * 4
    cache.release()
    assert (cache.num_bytes, cache.is_released) == (0, True)
    cache.resume()
    assert not cache.is_released
    assert 0 < cache.num_bytes < before
    cache.reserve(300)
    assert cache.keys[0].shape[2] > 300


async def test_releasing_everything_leaves_no_tensor_with_memory(model: ServedModel, tiny_model: Path) -> None:
    store = WeightStore(model.network)
    scheduler = Scheduler(model, 2, 64, False, "0.0")
    release = MemoryRoutes(scheduler, store).routes()["/release_memory_occupation"]
    assert sum(tensor.untyped_storage().nbytes() for tensor in model.network.parameters()) > 0
    await release({})
    assert sum(tensor.untyped_storage().nbytes() for tensor in model.network.parameters()) == 0
    request = Request("r", [1, 2], DrawParams(1, 1.0, 0, 1.0, frozenset(), 0), False, None)
    with pytest.raises(BadRequestError, match="KV cache is released"):
        scheduler.submit(request)
    model.cache.resume()
    tensors = load_file(tiny_model / "model.safetensors")
    name = next(iter(tensors))
    store.swap(store.stage({name: tensors.pop(name)}))
    with pytest.raises(BadRequestError, match=f"{len(tensors)} weights was released"):
        scheduler.submit(request)
    store.swap(store.stage(tensors))
    scheduler.submit(request)
    assert scheduler.num_waiting == 1
