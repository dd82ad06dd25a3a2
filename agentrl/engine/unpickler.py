"""Reads tensors from a pickle without letting it run code."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
import re
import struct
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.multiprocessing import reductions

from agentrl.engine.request import BadRequestError
from agentrl.weights.flattened import FlattenedTensorMetadata, unflatten
from agentrl.weights.payloads import SGLANG_METADATA

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_REDUCTIONS = "torch.multiprocessing.reductions"
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "FloatStorage"),
    ("torch", "DoubleStorage"),
    ("torch", "HalfStorage"),
    ("torch", "BFloat16Storage"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
    (_REDUCTIONS, "rebuild_tensor"),
    (_REDUCTIONS, "rebuild_typed_storage"),
    *(("torch", name) for name in DTYPES),
}
# Names of torch's own shared memory and of the process that keeps it: a payload maps nothing else.
_SHARED_NAME = re.compile(rb"/torch_\d+_\d+_\d+")
_MANAGER_FOLDER = re.compile(r"torch-shm-dir-\w+")
# CUDA IPC: what torch rebuilds a tensor from, and how many counts of readers one of its files holds.
_CUDA_SIGNATURE = inspect.signature(reductions.rebuild_cuda_tensor)
_CUDA_COUNTERS = 10_000
# Errors that damaged bytes raise, found by fuzzing.
_DAMAGE = (
    pickle.UnpicklingError, struct.error, EOFError, ValueError, TypeError, LookupError, ArithmeticError,
    AttributeError, AssertionError, ImportError, MemoryError, RuntimeError, OSError,
)  # fmt: skip


class _TensorUnpickler(pickle.Unpickler):
    """Finds only what pickled tensors need; storages are read with weights_only, shared ones checked by name."""

    def find_class(self, module: str, name: str) -> Any:
        """The allowed global of that name, or our stand-in for it."""
        stand_in = _STAND_INS.get((module, name))
        if stand_in is not None:
            return stand_in
        if (module, name) not in _ALLOWED:
            raise BadRequestError(f"the payload asks for {module}.{name}; only plain tensors are read")
        return super().find_class(module, name)


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> torch.Tensor:
    """As torch does, except that a storage that is too small is an error; torch would enlarge it uninitialised."""
    _check_extent(storage._untyped_storage.nbytes() // storage.dtype.itemsize, offset, size, stride)
    tensor: torch.Tensor = torch._utils._rebuild_tensor_v2(storage, offset, size, stride, *more)
    return tensor


def _check_extent(num_values: int, offset: int, size: Any, stride: Any) -> None:
    """Whether a view lies inside of its storage. Raises ValueError."""
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if min(offset, *size, *stride, 0) < 0 or (0 not in size and last >= num_values):
        raise ValueError(f"a tensor of shape {tuple(size)} reaches beyond its {num_values} values")


def _map_storage(kind: Any, manager: bytes, handle: bytes, size: int, dtype: Any = None) -> Any:
    place = PurePosixPath(manager.decode())
    if not _SHARED_NAME.fullmatch(handle) or not _MANAGER_FOLDER.fullmatch(place.parent.name):
        raise BadRequestError(f"the payload maps {handle!r}, which is no shared memory of torch")
    return reductions.rebuild_storage_filename(kind, manager, handle, size, dtype)


def _map_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """As torch does, if the shared count of readers that it decrements is torch's own."""
    given = _CUDA_SIGNATURE.bind(*arguments).arguments
    if given["storage_handle"] is not None:
        handle, place = given["ref_counter_handle"], given["ref_counter_offset"]
        if not _SHARED_NAME.fullmatch(handle) or not 0 <= place < _CUDA_COUNTERS:
            raise BadRequestError(
                f"the payload counts its readers at {place} of {handle!r}, which is no count of torch"
            )
    num_values = given["storage_size_bytes"] // given["dtype"].itemsize
    _check_extent(num_values, given["tensor_offset"], given["tensor_size"], given["tensor_stride"])
    tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments)
    return tensor


_STAND_INS: dict[tuple[str, str], Any] = {
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    (_REDUCTIONS, "rebuild_storage_filename"): _map_storage,
    (_REDUCTIONS, "rebuild_cuda_tensor"): _map_cuda_tensor,
    SGLANG_METADATA: FlattenedTensorMetadata,
}


def load_named_tensors(payload: str) -> dict[str, torch.Tensor]:
    """Tensors by name from base64 of a pickled list of pairs or dict, as SGLang's tensor updates and adapters are.

    Raises:
        BadRequestError: not base64, not a pickle, asks for anything but tensors, or has another shape.
    """
    pairs = _load(payload)
    try:
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        tensors = {name: tensor for name, tensor in pairs}  # noqa: C416 - unpacking checks the shape
    except _DAMAGE as error:
        raise BadRequestError(f"serialized_named_tensors cannot be read: {error}") from error
    if not all(isinstance(n, str) and isinstance(t, torch.Tensor) for n, t in tensors.items()):
        raise BadRequestError("serialized_named_tensors must be pairs of a name and a tensor")
    return tensors


def load_bucket(payload: str) -> dict[str, torch.Tensor]:
    """Tensors by name from base64 of a pickled flattened bucket.

    Raises:
        BadRequestError: not base64, not a pickle, no bucket, or one whose places contradict each other.
    """
    bucket = _load(payload)
    try:
        return unflatten(bucket["flattened_tensor"], bucket["metadata"])
    except _DAMAGE as error:
        raise BadRequestError(f"the flattened bucket cannot be read: {error}") from error


def _load(payload: str) -> Any:
    try:
        data = base64.b64decode(payload, validate=True)
        return _TensorUnpickler(io.BytesIO(data)).load()
    except BadRequestError:
        raise
    except _DAMAGE as error:
        raise BadRequestError(f"serialized_named_tensors cannot be read: {error}") from error
