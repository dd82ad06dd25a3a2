"""What changed between two versions of weights, and how the newer one is made of it.

A step of reinforcement learning at a small rate changes few values of weights in a narrow dtype, and
nearly all of float32 weights. Comparison is by bits, so what is rebuilt is the same to the last one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agentrl.inference.checksum import tensor_checksum
from agentrl.types.errors import StorageError
from agentrl.weights.buckets import weight_files
from agentrl.weights.digests import DIGESTS, PROGRESS

_WEIGHTS = "model.safetensors"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX, _VALUES, _WHOLE = "index:", "values:", "whole:"


def encode_delta(old: Path, new: Path, target: Path, full_above: float) -> int:
    """Write what turns `old` into `new` to a file; returns its bytes.

    A tensor of n values, k of them changed, becomes k positions (int32, or int64 from 2**31 on) and k
    values; whole if ``k > full_above * n``; nothing if k is 0.

    Raises:
        StorageError: a folder cannot be read, or the file not be written.
    """
    before, after = _load(old), _load(new)
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in after.items():
        known = before.get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            parts[_WHOLE + name] = tensor
            continue
        bits = _BITS[tensor.element_size()]
        flat = tensor.reshape(-1)
        changed = torch.nonzero(flat.view(bits) != known.reshape(-1).view(bits))[:, 0]
        if len(changed) > full_above * len(flat):
            parts[_WHOLE + name] = tensor
        elif len(changed):
            parts[_INDEX + name] = changed.to(torch.int32) if len(flat) < 2**31 else changed
            parts[_VALUES + name] = flat[changed]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(parts, target, {"names": json.dumps(sorted(after))})
    except (OSError, RuntimeError) as error:
        raise StorageError(f"delta {target} cannot be written: {error}") from error
    return target.stat().st_size


def apply_delta(old: Path, delta: Path, target: Path, checksums: dict[str, str]) -> None:
    """Rebuild the newer weights in a new folder, beside the files that loading them takes.

    Raises:
        StorageError: something cannot be read or written, or a checksum differs.
    """
    parts = load_file(delta)
    with safe_open(delta, "pt") as file:
        names = json.loads(file.metadata()["names"])
    weights = {name: tensor for name, tensor in _load(old).items() if name in names}
    for key, tensor in parts.items():
        kind, name = key.split(":", 1)
        if kind + ":" == _WHOLE:
            weights[name] = tensor
        elif kind + ":" == _INDEX:
            whole = weights[name].clone()
            whole.view(-1)[tensor.long()] = parts[_VALUES + name]
            weights[name] = whole
    _check(weights, checksums, delta)
    staging = target.with_name(target.name + ".staging")
    shutil.rmtree(staging, ignore_errors=True)
    copy_companions(old, staging)
    try:
        save_file(weights, staging / _WEIGHTS, {"format": "pt"})
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    except (OSError, RuntimeError) as error:
        raise StorageError(f"weights cannot be rebuilt in {target}: {error}; free space there") from error


def copy_companions(source: Path, target: Path) -> None:
    """Copy what loading a model takes beside its weights: configuration, tokenizer, generation settings."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".gguf") or file.name.endswith(".index.json")
        is_of_folder = file.name in (DIGESTS, PROGRESS)
        if file.is_file() and not is_weights and not is_of_folder:
            shutil.copy2(file, target / file.name)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    try:
        for file in weight_files(folder):
            weights.update(load_file(file))
    except (OSError, RuntimeError) as error:
        raise StorageError(f"weights in {folder} cannot be read: {error}") from error
    return weights


def _check(weights: dict[str, torch.Tensor], checksums: dict[str, str], delta: Path) -> None:
    wrong = [n for n in sorted(weights.keys() & checksums.keys()) if tensor_checksum(weights[n]) != checksums[n]]
    if wrong or (checksums and not weights.keys() & checksums.keys()):
        what = wrong[0] if wrong else "all of them"
        raise StorageError(f"weights rebuilt from {delta} have wrong checksums, such as {what}")
