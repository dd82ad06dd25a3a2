"""Files of JSON objects, one a line, each with a checksum of its own."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl import codec
from agentrl.types.errors import StorageError

_log = logging.getLogger(__name__)


class JsonLines:
    """Appends one JSON object a line and hands it to the system at once, so that a crash loses nothing written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._naming_the_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _mend_last_line(path)
            self._file = path.open("ab", buffering=0)

    def append(self, text: str) -> None:
        """Write one object, sealed. Raises StorageError naming the file."""
        data = codec.seal(text.encode()) + b"\n"
        with self._naming_the_file():
            while data:
                data = data[self._file.write(data) :]

    def sync(self) -> int:
        """Let all lines outlive a loss of power; returns the file's size in bytes. Raises StorageError."""
        with self._naming_the_file():
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file; safe to call twice. A line that could not be written has been reported by then."""
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error}; free space, then resume the run") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file. Raises StorageError, as `read_lines` does."""
    return [json.loads(line) for line in read_lines(path)]


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file, each one JSON object, without their seals. A last one that a crash cut off is left out.

    Raises:
        StorageError: the file cannot be read, or a line is damaged.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if last and not _is_cut_off(last):
        lines.append(last)
    found = [_object_of(path, number, line) for number, line in enumerate(lines, start=1)]
    return [line for line in found if line is not None]


def _object_of(path: Path, number: int, line: bytes) -> bytes | None:
    try:
        text = codec.unseal(line)
    except ValueError as error:
        raise StorageError(
            f"{path} is damaged in line {number}: {error}; restore the file from a copy, or take the line out"
        ) from None
    if not _is_json(text):
        # Older programs went on behind a line that a crash had cut off.
        _log.warning("%s: line %d is no JSON and is left out; take it out of the file, or restore that", path, number)
        return None
    return text


def _mend_last_line(path: Path) -> None:
    """Take out a line that a crash cut off, so that the next one is not joined to it. Raises OSError."""
    data = path.read_bytes() if path.is_file() else b""
    kept_bytes = data.rfind(b"\n") + 1
    if kept_bytes == len(data):
        return
    with path.open("rb+") as file:
        if not _is_cut_off(data[kept_bytes:]):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return
        file.truncate(kept_bytes)
    _log.warning("%s: its last %d bytes, a line that a crash cut off, are taken out", path, len(data) - kept_bytes)


def _is_cut_off(last: bytes) -> bool:
    """Whether a line that does not end is only the beginning of one."""
    return not codec.is_sealed_whole(last) and not _is_json(last)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
