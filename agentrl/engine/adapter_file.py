"""Opens LoRA adapters in folders of PEFT's form; loads no tensor library, for processes that only move bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import msgspec

from agentrl.engine.request import BadRequestError

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter whose tensors have not been read yet; they are `size_bytes` behind the header.

    The versions of a run differ in these alone: their `config` and `header` are the same to the last byte.
    """

    config: bytes
    header: bytes
    size_bytes: int
    _file: FileIO

    def fill(self, target: memoryview) -> None:
        """Read the bytes of all tensors, as they lie in the file, into memory of that size in one piece."""
        while target:
            count = self._file.readinto(target)
            if not count:
                raise ValueError(f"{len(target)} bytes are missing at its end")
            target = target[count:]


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
