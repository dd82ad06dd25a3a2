from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from agentrl.engine.slots import lazy_zeros

MIB = 2**20


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
