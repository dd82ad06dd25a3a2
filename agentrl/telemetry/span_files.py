"""Files of spans: each process of a run appends to one of its own, as JSON lines."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread

import msgspec

from agentrl.telemetry.spans import Span, SpanSink

TRACES = "traces"
"""Name of the folder of these files in a run's."""
_FLUSH_BYTES, _FLUSH_S = 2**16, 1.0
_MAX_PIECES = 256  # some 16 MB that a disk may be behind
_CLOSE_S = 5.0
_END = b""
_LATEST_S = 1e11  # some thousand years, of which microseconds still are whole numbers of 64 bits
_log = logging.getLogger(__name__)


class SpanFile:
    """Appends spans by a thread, so that a slow disk holds up nothing; a process that is killed loses its last second.

    The file is of this process alone, so that a line that a kill cut off is the last. What cannot be written, or not as
    fast as it comes, is lost, and told once: it neither ends a run nor hides what does.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self.path = folder / f"{process}.{os.getpid()}.{time.time_ns()}.jsonl"
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._flushed_s = time.monotonic()
        self._is_lost = False
        self._pieces: Queue[bytes] = Queue(_MAX_PIECES)
        self._writer: Thread | None = None

    def write(self, span: Span) -> None:
        """Append one line."""
        self._encoder.encode_into(span, self._buffer, -1)
        self._buffer += b"\n"
        if len(self._buffer) > _FLUSH_BYTES or time.monotonic() - self._flushed_s > _FLUSH_S:
            self._hand_over()

    def close(self) -> None:
        """Write what is left, for as long as that takes but some seconds; safe to call twice."""
        self._hand_over()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        with suppress(Full):
            self._pieces.put(_END, timeout=_CLOSE_S)
        writer.join(_CLOSE_S)
        if writer.is_alive():
            self._lose(f"its disk has not answered for {_CLOSE_S:.0f} s")

    def _hand_over(self) -> None:
        piece, self._buffer = bytes(self._buffer), bytearray()
        self._flushed_s = time.monotonic()
        if not piece or self._is_lost:
            return
        if self._writer is None:
            self._writer = Thread(target=self._append_all, name="spans", daemon=True)
            self._writer.start()
        try:
            self._pieces.put_nowait(piece)
        except Full:
            self._lose("its disk is slower than spans come")

    def _append_all(self) -> None:
        """Waits for: pieces. Unblocked by: the next one, or `close`."""
        while (piece := self._pieces.get()) != _END:
            if not self._is_lost:
                self._append(piece)

    def _append(self, piece: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(piece)
        except OSError as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        _log.warning("%s cannot be written: %s; the trace misses what comes from here on", self.path, why)


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
