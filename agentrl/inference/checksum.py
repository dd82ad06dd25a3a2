"""Digests of tensors that trainer and engine compute alike."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_DIGEST_BYTES = 8


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Digest of a tensor's dtype, shape and bytes.

    A float64 tensor counts as float32: float64 serves only to compute with weights that were trained
    in float32, which it holds exactly.
    """
    plain = tensor.detach().cpu().contiguous()
    if str(plain.dtype) == "torch.float64":
        plain = plain.float()
    digest = hashlib.blake2b(f"{plain.dtype}{tuple(plain.shape)}".encode(), digest_size=_DIGEST_BYTES)
    digest.update(plain.view(-1).view(dtype=_bytes_dtype()).numpy())
    return digest.hexdigest()


def _bytes_dtype() -> torch.dtype:
    import torch

    return torch.uint8
