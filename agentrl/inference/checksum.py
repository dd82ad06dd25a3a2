"""Digests of tensors that trainer and engine compute alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


def checksum_key(dtype: str | None, name: str) -> str:
    """A tensor's key among checksums: narrow dtypes have keys of their own, since the same weights differ in them.

    Example: ``bfloat16`` and ``lm_head.weight`` give ``bfloat16:lm_head.weight``; float32 names stay as they are.
    """
    narrow = str(dtype).removeprefix("torch.")
    return f"{narrow}:{name}" if narrow in ("bfloat16", "float16") else name


def dtype_of_key(key: str) -> str:
    """The narrow dtype that a key names, or "" for float32."""
    return key.rpartition(":")[0]


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Digest of a tensor's dtype, shape and bytes: 128 bits of XXH3, at some ten gigabytes a second.

    It tells weights apart that went astray, not weights that somebody forged.
    A float64 tensor counts as float32: float64 serves only to compute with weights that were trained
    in float32, which it holds exactly.
    """
    plain = tensor.detach().cpu().contiguous()
    if str(plain.dtype) == "torch.float64":
        plain = plain.float()
    digest = xxhash.xxh3_128(f"{plain.dtype}{tuple(plain.shape)}".encode())
    digest.update(plain.view(-1).view(dtype=_bytes_dtype()).numpy().data)
    return digest.hexdigest()


def _bytes_dtype() -> torch.dtype:
    import torch

    return torch.uint8
