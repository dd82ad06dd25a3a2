"""Files of spans: each process of a run appends to one of its own, as JSON lines."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from agentrl.telemetry.spans import Span, SpanSink

TRACES = "traces"
"""Name of the folder of these files in a run's."""
_FLUSH_BYTES, _FLUSH_S = 2**16, 1.0
_LATEST_S = 1e11  # some thousand years, of which microseconds still are whole numbers of 64 bits
_log = logging.getLogger(__name__)


class SpanFile:
    """Appends spans; a process that is killed loses those of its last second.

    The file is of this process alone, so that a line that a kill cut off is the last. What cannot be written is lost,
    and told once: it neither ends a run nor hides what does.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self.path = folder / f"{process}.{os.getpid()}.{time.time_ns()}.jsonl"
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._flushed_s = time.monotonic()
        self._is_lost = False

    def write(self, span: Span) -> None:
        """Append one line."""
        self._encoder.encode_into(span, self._buffer, -1)
        self._buffer += b"\n"
        if len(self._buffer) > _FLUSH_BYTES or time.monotonic() - self._flushed_s > _FLUSH_S:
            self._flush()

    def close(self) -> None:
        """Write what is left; safe to call twice."""
        self._flush()

    def _flush(self) -> None:
        data, self._buffer = self._buffer, bytearray()
        self._flushed_s = time.monotonic()
        if not data or self._is_lost:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._is_lost = True
            _log.warning("%s cannot be written: %s; the trace misses what comes from here on", self.path, error)


class SpanSinks:
    """Several sinks as one."""

    def __init__(self, sinks: list[SpanSink]) -> None:
        self._sinks = sinks

    def write(self, span: Span) -> None:
        """Write to all."""
        for sink in self._sinks:
            sink.write(span)

    def close(self) -> None:
        """Close all; safe to call twice."""
        for sink in self._sinks:
            sink.close()


def read_spans(folder: Path) -> Iterator[tuple[str, Span]]:
    """All spans of a run with the process that wrote each; a line that a kill cut off, or that is damaged, is left out.

    Example: those of ``worker-1.4711.1764.jsonl`` come with ``worker-1``.
    """
    decoder = msgspec.json.Decoder(Span)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            span = _decoded(decoder, line)
            if span is not None:
                yield path.name.split(".")[0], span


def _decoded(decoder: msgspec.json.Decoder[Span], line: bytes) -> Span | None:
    with suppress(msgspec.DecodeError):
        span = decoder.decode(line)
        return span if 0.0 <= span.start_s <= span.end_s < _LATEST_S else None
    return None
