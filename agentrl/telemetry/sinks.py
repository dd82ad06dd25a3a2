"""Metric sinks: plain files that common tools read."""

from __future__ import annotations

import json
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from agentrl.protocols import MetricSink
from agentrl.telemetry.json_lines import JsonLines

_log = logging.getLogger(__name__)


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
    """Metrics as TensorBoard events, a copy of ``metrics.jsonl`` for one tool.

    What cannot be written is lost, counted and told once: it neither ends a run nor hides what does. A file that took
    a part of an event is not written again, since nobody could read on behind that.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        with _hidden("torch"):
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import masked_crc32c
            from tensorboardX.summary import scalar

        self._event, self._scalar, self._checksum, self._clock = Event, scalar, masked_crc32c, clock
        self.lost = 0
        self._file: FileIO | None = None
        self._is_closed = False
        self._path = folder / f"events.out.tfevents.{int(clock())}.{socket.gethostname()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._append(self._file, [Event(wall_time=clock(), file_version="brain.Event:2")])
        except OSError as error:
            self._lose(0, error)

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Record every number among the metrics, or count them as lost."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if self._file is None:
            self.lost += len(numbers)
            return
        now = self._clock()
        try:
            events = [self._event(wall_time=now, step=step, summary=self._scalar(n, v)) for n, v in numbers.items()]
            self._append(self._file, events)
        except OSError as error:
            self._lose(len(numbers), error)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._give_up()
        if self.lost and not self._is_closed:
            _log.warning("%d metrics are not in %s", self.lost, self._path)
        self._is_closed = True

    def _append(self, file: FileIO, events: Iterable[Any]) -> None:
        """Write events as TensorFlow's records: length u64, its checksum u32, bytes, their checksum u32."""
        data = b""
        for event in (event.SerializeToString() for event in events):
            length = struct.pack("<Q", len(event))
            data += length + struct.pack("<I", self._checksum(length)) + event
            data += struct.pack("<I", self._checksum(event))
        while data:
            data = data[file.write(data) :]

    def _lose(self, count: int, error: OSError) -> None:
        self.lost += count
        self._give_up()
        _log.warning(
            "%s cannot be written: %s; TensorBoard misses what comes from here on, metrics.jsonl has it; free space",
            self._path,
            error,
        )

    def _give_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what it would say has been said, or is of a file that is a copy
                file.close()


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
