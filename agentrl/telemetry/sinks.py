"""Metric sinks: plain files that common tools read."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.protocols import MetricSink
from agentrl.types.errors import StorageError


class JsonLines:
    """Appends one JSON object a line and hands it to the system at once, so that a crash loses nothing written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._naming_the_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_last_line(path)
            self._file = path.open("a", encoding="utf-8")

    def append(self, text: str) -> None:
        """Write one line. Raises StorageError naming the file."""
        with self._naming_the_file():
            self._file.write(text + "\n")
            self._file.flush()

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


def _end_last_line(path: Path) -> None:
    """Close a line that a crash cut off, so that the next one is not joined to it."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines; a line that a crash cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


class JsonlSink:
    """Metrics as JSON lines: ``{"step": 3, "time": 1764000000.0, "trainer/loss": 0.1, ...}``."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(path)
        self._clock = clock

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Append one line. Raises StorageError."""
        self._lines.append(json.dumps({"step": step, "time": round(self._clock(), 3), **metrics}))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._lines.close()


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Let an import pass for one that is not installed, unless it is loaded already.

    tensorboardX loads torch wherever it finds it, which costs a run's driver seconds at every start and 130 MB, for
    tensors that it is never given here.
    """
    if module in sys.modules:
        yield
        return
    # None stands for a module that cannot be imported, which the annotation leaves out.
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


class TensorBoardSink:
    """Metrics as TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        with _hidden("torch"):
            from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Record every number among the metrics."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        self._writer.close()


class SinkSet:
    """Several sinks as one."""

    def __init__(self, sinks: list[MetricSink]) -> None:
        self._sinks = sinks

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Write to all."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close all; safe to call twice."""
        for sink in self._sinks:
            sink.close()
