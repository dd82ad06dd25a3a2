"""Reads LoRA adapters from folders in PEFT's form."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from agentrl.engine.request import BadRequestError

_LENGTH_BYTES = 8
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies in a file of safetensors, in bytes behind the header."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter whose tensors have not been read yet; they are `size_bytes` behind the header.

    The versions of a run differ in these alone: their `config` and `header` are the same to the last byte.
    """

    config: bytes
    header: bytes
    size_bytes: int
    _file: FileIO

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, in memory of their own."""
        memory = torch.empty(self.size_bytes, dtype=torch.uint8)
        raw = msgspec.json.decode(self.header, type=dict[str, msgspec.Raw])
        entries = {name: entry for name, entry in raw.items() if name != "__metadata__"}
        tensors = {name: _view(memory, name, msgspec.json.decode(e, type=_Entry)) for name, e in entries.items()}
        self.fill(memory)
        return tensors

    def fill(self, target: torch.Tensor) -> None:
        """Read the bytes of all tensors, as they lie in the file, into memory of that size in one piece."""
        rest = memoryview(target.view(torch.uint8).numpy())
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise ValueError(f"{len(rest)} bytes are missing at its end")
            rest = rest[count:]


@contextmanager
def open_adapter(folder: Path) -> Iterator[AdapterFile]:
    """A PEFT folder's adapter, whose bytes can be read once.

    Raises:
        BadRequestError: also inside the context: it cannot be read, or is damaged.
    """
    try:
        config = (folder / "adapter_config.json").read_bytes()
        with FileIO(folder / "adapter_model.safetensors") as file:
            header, size_bytes = _read_header(file)
            yield AdapterFile(config, header, size_bytes, file)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BadRequestError(f"the adapter in {folder} cannot be read: {error}") from error


def _read_header(file: FileIO) -> tuple[bytes, int]:
    """The header, and how many bytes are behind it."""
    size = os.fstat(file.fileno()).st_size - _LENGTH_BYTES
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > size:
        raise ValueError(f"its header of {length} bytes is cut off")
    return file.read(length), size - length


def _view(memory: torch.Tensor, name: str, entry: _Entry) -> torch.Tensor:
    if entry.dtype not in _DTYPES:
        raise ValueError(f"tensor {name} is of dtype {entry.dtype}")
    kind, (start, end) = _DTYPES[entry.dtype], entry.data_offsets
    count = math.prod(entry.shape) * kind.itemsize
    if end - start != count or end > len(memory) or start % kind.itemsize:
        raise ValueError(
            f"tensor {name} of shape {entry.shape} is said to lie at bytes {start} to {end} of {len(memory)}"
        )
    return memory[start:end].view(kind).view(entry.shape)
