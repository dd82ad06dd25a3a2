"""Stands for SGLang's kernel package, which has no build for a plain CPU.

The server imports names from here when it starts. Where the CPU has no matrix extension that this package drives,
every layer computes with torch and none of the kernels is called, except the one below.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    _width: int,
) -> None:
    """Write the KV places of each request, ``places`` cut one after the other, into its row of the table."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        count = end - start
        table[row, start:end] = places[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Any:
    """A kernel of any other name: it can be imported, not called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(f"kernel {name} is not in this placeholder")

    kernel.__name__ = name
    return kernel
