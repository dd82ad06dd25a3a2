from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stepping import make_scheduler

from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.engine.request import BadRequestError, DrawParams, Request
from agentrl.engine.server import MemoryRoutes
from agentrl.engine.slots import KVCache, lazy_zeros
from agentrl.engine.weights import WeightStore

MIB = 2**20


@pytest.fixture
def model(tiny_model: Path) -> ServedModel:
    return ServedModel(EngineOptions(model=tiny_model, port=1, max_running_requests=2))


def test_a_released_cache_holds_no_byte_and_grows_again() -> None:
    cache = KVCache(4, "cpu")
    for layer in range(3):
        cache.layer(layer, *[torch.zeros(1, 2, 1, 8)] * 2)
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
    scheduler = make_scheduler(model, 2, prefill_tokens=64)
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


_LIMITED = """
import resource, sys
from pathlib import Path
from agentrl.engine.model import ServedModel
from agentrl.engine.options import EngineOptions
from agentrl.types.errors import ConfigError

def options(slots):
    return EngineOptions(model=Path(sys.argv[1]), port=1, max_running_requests=slots)

ServedModel(options(2))
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**29
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    ServedModel(options(2**20))
except ConfigError as error:
    print(error)
"""


def test_too_few_addresses_for_the_cache_are_an_error_that_names_the_remedy(tiny_model: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tiny_model)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "KV of 1048576 requests" in told
    assert "ulimit -v" in told


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives addresses without memory")
def test_one_piece_of_memory_may_be_larger_than_that_of_the_machine() -> None:
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    zeros = lazy_zeros((2 * machine_bytes,), torch.uint8, "cpu")
    zeros[-1] = 1
    assert zeros[-1] == 1


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("freed_bytes", [0, 24 * MIB])
def test_zeros_take_no_memory_before_they_are_written_whatever_was_freed_before(freed_bytes: int) -> None:
    """What is freed moves the limit above which the C library asks the kernel for memory."""
    del_me = torch.ones(freed_bytes, dtype=torch.uint8)
    del del_me
    before = _resident_bytes()
    zeros = [lazy_zeros((12 * MIB // 4,), torch.float32, "cpu") for _ in range(8)]
    assert _resident_bytes() - before < MIB
    assert not any(tensor.any() for tensor in zeros)
    zeros[0].fill_(1.0)
    assert _resident_bytes() - before > 11 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (2, 1, 7)])
def test_shape_and_dtype_are_as_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = lazy_zeros(shape, dtype, "cpu")
    assert zeros.shape == shape
    assert zeros.dtype == dtype
    assert not zeros.any()
