"""Memory that is zero and costs nothing before it is written."""

from __future__ import annotations

import math
import mmap
import sys

import torch

_MAP_NORESERVE = 0x4000  # of Linux, named by Python 3.13; without it one piece may not exceed the machine's memory


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros; on a CPU the kernel makes them when they are first written, which `torch.zeros` does at once.

    The memory comes from the kernel itself. What the C library gives is fresh only above a limit that moves with what
    was freed before, so the same call may take microseconds or, for a KV cache that grows, a second.

    Raises:
        OSError: the process may not have so many addresses.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform != "linux":
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    else:
        memory = mmap.mmap(-1, num_bytes, flags=flags | _MAP_NORESERVE)
        # Where few bytes far apart are written, pages of 2 MiB would take all of the memory at once.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
