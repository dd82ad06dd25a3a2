"""Reads files that a call names: regular ones alone, piece by piece, from a disk that may not answer."""

from __future__ import annotations

import asyncio
import math
import os
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import orjson
import torch

from agentrl.engine.request import BadRequestError
from agentrl.process.threads import run_in_thread
from agentrl.types.errors import StorageError

Result = TypeVar("Result")

_STALL_S = 60.0
_PIECE_BYTES = 2**24
_HEADER_LIMIT_BYTES = 100_000_000  # as the library has it
_SHOWN_CHARS = 1000
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(slots=True)
class Pace:
    """When a reader last got something; whoever waits for it looks here."""

    at_s: float = field(default_factory=time.monotonic)

    def went_on(self) -> None:
        """It has just got something."""
        self.at_s = time.monotonic()


async def read_in_time(what: str, read: Callable[[Pace], Result]) -> Result:
    """The result of `read`, which is computed in a thread; that of a disk that does not answer is left to itself.

    Waits for: the disk. Unblocked by: its answers, or a minute without any.

    Raises:
        BadRequestError: `what` cannot be read, or its disk does not answer.
    """
    pace = Pace()
    reading = asyncio.ensure_future(run_in_thread("read-files", lambda: read(pace)))
    while not reading.done():
        left_s = pace.at_s + _STALL_S - time.monotonic()
        if left_s <= 0:
            reading.cancel()
            raise BadRequestError(f"{what[:_SHOWN_CHARS]} cannot be read: its disk does not answer")
        await asyncio.wait({reading}, timeout=left_s)
    try:
        return reading.result()
    except (OSError, ValueError, LookupError, TypeError, StorageError, struct.error) as error:
        why = str(error)[:_SHOWN_CHARS]
        raise BadRequestError(f"{what[:_SHOWN_CHARS]} cannot be read: {why}") from error


def read_file(path: Path, pace: Pace) -> bytes:
    """A file as it is. Raises OSError, also if it is no regular file."""
    with _open(path) as file:
        return _read(file, os.fstat(file.fileno()).st_size, pace)


def read_tensors(path: Path, pace: Pace) -> dict[str, torch.Tensor]:
    """The tensors of a file of safetensors, in memory of their own: one that is cut off meanwhile ends no process.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError, LookupError, TypeError, struct.error: it is damaged, or has a dtype that is not served.
    """
    with _open(path) as file:
        (header_bytes,) = struct.unpack("<Q", _read(file, 8, pace))
        left_bytes = os.fstat(file.fileno()).st_size - 8 - header_bytes
        if left_bytes < 0 or header_bytes > _HEADER_LIMIT_BYTES:
            raise ValueError(f"{path.name} is shorter than its header says")
        header = orjson.loads(_read(file, header_bytes, pace))
        if not isinstance(header, dict):
            raise ValueError(f"the header of {path.name} is no object")
        tensors: dict[str, torch.Tensor] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                left_bytes -= _num_bytes(path, name, entry, left_bytes)
                file.seek(8 + header_bytes + entry["data_offsets"][0])
                tensors[name] = _read_tensor(file, _DTYPES[entry["dtype"]], entry["shape"], pace)
    return tensors


def _num_bytes(path: Path, name: str, entry: dict[str, Any], left_bytes: int) -> int:
    """Of a tensor, of which all together have no more than the file. Raises ValueError."""
    (start, end), shape, dtype = entry["data_offsets"], entry["shape"], _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name} in {path.name} has the dtype {entry['dtype']}; served: {', '.join(_DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"{name} in {path.name} has a place or shape that is none")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} in {path.name} has {end - start} bytes, which are none of its shape {shape}")
    if end - start > left_bytes:
        raise ValueError(f"{path.name} is shorter than its tensors")
    return int(end - start)


def _read_tensor(file: FileIO, dtype: torch.dtype, shape: list[int], pace: Pace) -> torch.Tensor:
    flat = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    _fill(file, memoryview(flat.numpy().data), pace)
    return flat.view(dtype).reshape(shape)


def _open(path: Path) -> FileIO:
    """Raises OSError if it is no regular file: opening a pipe would wait for somebody to write."""
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file")
    return file


def _read(file: FileIO, num_bytes: int, pace: Pace) -> bytes:
    data = bytearray(num_bytes)
    _fill(file, memoryview(data), pace)
    return bytes(data)


def _fill(file: FileIO, memory: memoryview, pace: Pace) -> None:
    """Raises OSError if the file ends before that."""
    done = 0
    while done < len(memory):
        num_read = file.readinto(memory[done : done + _PIECE_BYTES])
        if not num_read:
            raise OSError("a file ends early")
        done += num_read
        pace.went_on()
