"""Reads tensors from a pickle, which may hold nothing else, and no more of them than it brings or names."""

from __future__ import annotations

import base64
import inspect
import io
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.multiprocessing import reductions

from agentrl.engine.pickles import Name, PickleReader, Record
from agentrl.engine.request import BadRequestError
from agentrl.weights.flattened import FlattenedTensorMetadata, unflatten

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_REDUCTIONS = "torch.multiprocessing.reductions"
# Names that are dtypes, names of dtypes by which files know storages, and classes, for which nothing is needed.
_VALUES: Mapping[Name, Any] = {
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
    ("torch", "Tensor"): None,
    ("torch._tensor", "Tensor"): None,
    ("torch.storage", "TypedStorage"): None,
    ("torch.storage", "UntypedStorage"): None,
}
_PLACE: Name = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
# Names of torch's own shared memory and of the process that keeps it: a payload maps nothing else.
_SHARED_NAME = re.compile(rb"/torch_\d+_\d+_\d+")
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_HEADER_BYTES = 64  # the count of readers in front of the values
_MANAGER_FOLDER = re.compile(r"torch-shm-dir-\w+")
# CUDA IPC: what torch rebuilds a tensor from, and how many counts of readers one of its files holds.
_CUDA_SIGNATURE = inspect.signature(reductions.rebuild_cuda_tensor)
_CUDA_COUNTERS = 10_000
# Errors that damaged bytes raise, found by fuzzing.
_DAMAGE = (
    struct.error, EOFError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
    MemoryError, RuntimeError, OSError,
)  # fmt: skip


class _Storages:
    """What a payload's storages are made of: bytes that it brings, or memory that it names.

    A storage is one row of values. The same bytes are not taken twice, so all storages are no larger than the payload.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes_left = num_bytes

    def calls(self) -> dict[Name, Any]:
        """What a payload may call."""
        return {
            ("collections", "OrderedDict"): dict,
            ("torch", "Size"): tuple,
            ("torch.storage", "_load_from_bytes"): self._brought,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            (_REDUCTIONS, "rebuild_tensor"): lambda kind, values, place: _tensor(values, *place),
            (_REDUCTIONS, "rebuild_typed_storage"): lambda values, dtype: values.view(dtype),
            (_REDUCTIONS, "rebuild_storage_filename"): _map_storage,
            (_REDUCTIONS, "rebuild_cuda_tensor"): _map_cuda_tensor,
        }

    def _brought(self, data: bytes) -> torch.Tensor:
        """Five pickles, of which the fourth describes the storage, then the number of its values and these."""
        self._num_bytes_left -= len(data)
        if self._num_bytes_left < 0:
            raise ValueError("the same bytes are taken for several storages")
        file = io.BytesIO(data)
        reader = PickleReader(_VALUES, {}, frozenset())
        magic, version, system, described, _keys = [reader.read(file) for _ in range(5)]
        if (magic, version) != (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION):
            raise ValueError("a storage is not written as torch does inside of a pickle")
        if not system["little_endian"]:
            raise ValueError("a storage has its bytes in another order")
        dtype = described[1]
        (num_values,) = struct.unpack("<q", file.read(8))
        values = memoryview(data)[file.tell() :]
        if len(values) != num_values * dtype.itemsize:
            raise ValueError(f"a storage of {num_values} values comes with {len(values)} bytes")
        return torch.frombuffer(bytearray(values), dtype=dtype) if num_values else torch.empty(0, dtype=dtype)


def _tensor(
    values: torch.Tensor, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any = None, marks: Any = None
) -> torch.Tensor:
    """A view of a storage. Raises ValueError if that is too small, where torch would enlarge it uninitialised."""
    if marks:
        raise ValueError(f"a tensor has marks that change its values: {sorted(marks)}")
    _check_extent(len(values), offset, size, stride)
    return values.as_strided(size, stride, offset)


def _check_extent(num_values: int, offset: int, size: Any, stride: Any) -> None:
    """Whether a view lies inside of its storage, and has no more values than that. Raises ValueError."""
    if not all(type(number) is int for number in (offset, *size, *stride)):
        raise ValueError("a tensor's place in its storage must be given by integers")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if min(offset, *size, *stride, 0) < 0 or (0 not in size and max(last + 1, math.prod(size)) > num_values):
        raise ValueError(f"a tensor of shape {tuple(size)} reaches beyond its {num_values} values")


def _map_storage(kind: Any, manager: bytes, handle: bytes, size: int, dtype: Any = None) -> torch.Tensor:
    """The memory that another process shares, as long as it is: torch would enlarge it."""
    place = PurePosixPath(manager.decode())
    if not _SHARED_NAME.fullmatch(handle) or not _MANAGER_FOLDER.fullmatch(place.parent.name):
        raise BadRequestError(f"the payload maps {handle!r}, which is no shared memory of torch")
    num_bytes = size * (1 if dtype is None else dtype.itemsize)
    if _SHARED_MEMORY.is_dir() and num_bytes > (num_shared := _num_shared_bytes(handle)):
        raise BadRequestError(f"the payload maps {num_bytes} bytes of {handle!r}, which has {num_shared}")
    storage = reductions.rebuild_storage_filename(torch.UntypedStorage, manager, handle, num_bytes)
    mapped = torch.empty(0, dtype=torch.uint8).set_(storage)
    return mapped if dtype is None else mapped.view(dtype)


def _num_shared_bytes(handle: bytes) -> int:
    """Of values in a file of shared memory. Raises OSError."""
    file = _SHARED_MEMORY / handle.decode().removeprefix("/")
    return file.lstat().st_size - _SHARED_HEADER_BYTES


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
    plain = {"tensor_cls": torch.Tensor, "storage_cls": torch.storage.TypedStorage, "requires_grad": False}
    tensor: torch.Tensor = reductions.rebuild_cuda_tensor(**given | plain)
    return tensor


def payload_of(body: dict[str, Any]) -> str:
    """The base64 that a call brings tensors in. Raises BadRequestError."""
    payloads = body.get("serialized_named_tensors")
    if not isinstance(payloads, list) or len(payloads) != 1 or not isinstance(payloads[0], str):
        raise BadRequestError("serialized_named_tensors must be a list of one base64 string")
    return payloads[0]


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
        return unflatten(bucket["flattened_tensor"], [_place(record) for record in bucket["metadata"]])
    except _DAMAGE as error:
        raise BadRequestError(f"the flattened bucket cannot be read: {error}") from error


def _place(record: Any) -> FlattenedTensorMetadata:
    """Where a tensor lies in a bucket. Raises TypeError."""
    if type(record) is not Record:
        raise TypeError("metadata must be a list of FlattenedTensorMetadata")
    place = FlattenedTensorMetadata(**record.fields)
    counts = (place.start_idx, place.end_idx, place.numel, *place.shape)
    is_typed = type(place.name) is str and type(place.dtype) is torch.dtype
    if not is_typed or not all(type(count) is int for count in counts):
        raise TypeError("metadata must have a name, a dtype, and integers")
    return place


def _load(payload: str) -> Any:
    try:
        data = base64.b64decode(payload, validate=True)
        return PickleReader(_VALUES, _Storages(len(data)).calls(), frozenset({_PLACE})).read(io.BytesIO(data))
    except BadRequestError:
        raise
    except _DAMAGE as error:
        raise BadRequestError(f"serialized_named_tensors cannot be read: {error}") from error
