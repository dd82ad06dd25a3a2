"""The spans of a run as one trace in Chrome's format, which https://ui.perfetto.dev opens.

The process `episodes` has a row for each episode in play at a moment: the episode, and below it what it was doing
(`partition.py`), stretches that tile it without gap. Every process of the run has its own spans on rows of its own, as
many as it did things at once.
"""

from __future__ import annotations

import gzip
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from agentrl.telemetry.partition import partition
from agentrl.telemetry.span_files import TRACES, read_spans
from agentrl.telemetry.spans import Span, SpanKind, id_of

TRACE = "trace.json.gz"
"""Name of the file in a run's folder."""
_EPISODES = "episodes"
_IN_A_PIECE = 4096


@dataclass(frozen=True, slots=True)
class TraceSize:
    """What a trace has, and how many of its episodes have no end on record: they were cut off, or are in play."""

    episodes: int
    open_episodes: int
    spans: int


def write_trace(run: Path) -> TraceSize | None:
    """Write all spans of a run's folder to its trace; None if none were written. Raises OSError."""
    folder, trace = run / TRACES, run / TRACE
    if not folder.is_dir():
        return None
    by_process: defaultdict[str, list[Span]] = defaultdict(list)
    for process, span in read_spans(folder):
        by_process[process].append(span)
    all_spans = [span for spans in by_process.values() for span in spans]
    episodes, num_open = _episodes(all_spans)
    origin_s = min((span.start_s for span in all_spans), default=0.0)
    draft = trace.with_name(f"{trace.name}.{os.getpid()}.new")
    events = _events(by_process, episodes, origin_s)
    with gzip.open(draft, "wb", compresslevel=5) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":%s,"traceEvents":[' % _json({"unix_s_at_0": origin_s}))
        for number, piece in enumerate(_pieces(events)):
            file.write((b",\n" if number else b"\n") + b",\n".join(map(_json, piece)))
        file.write(b"\n]}\n")
    draft.replace(trace)
    return TraceSize(len(episodes), num_open, len(all_spans))


def _episodes(spans: Iterable[Span]) -> tuple[list[tuple[Span, list[Span]]], int]:
    """Each episode with its spans, in order of their starts; how many of them have no end on record."""
    of_trace: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        of_trace[span.trace].append(span)
    found, num_open = [], 0
    for trace, own in of_trace.items():
        root = next((span for span in own if span.kind is SpanKind.EPISODE), None)
        if root is None and own[0].parent and not _is_of_run(own):
            start_s, end_s = min(span.start_s for span in own), max(span.end_s for span in own)
            root = Span(
                SpanKind.EPISODE, trace, start_s, end_s, trace, id_of(trace), "", {"outcome": "no end on record"}
            )
            num_open += 1
        if root is not None:
            found.append((root, own))
    return sorted(found, key=lambda episode: episode[0].start_s), num_open


def _is_of_run(spans: Sequence[Span]) -> bool:
    """Whether a trace is of the run's own work, and of no episode."""
    return any(span.kind in (SpanKind.STEP, SpanKind.PUBLISH, SpanKind.EVALUATION) for span in spans)


def _events(
    by_process: Mapping[str, list[Span]], episodes: Sequence[tuple[Span, list[Span]]], origin_s: float
) -> Iterator[dict[str, object]]:
    yield _name("process_name", 1, 0, _EPISODES)
    rows: list[Span] = []
    for root, own in episodes:
        row = next((number for number, last in enumerate(rows) if last.end_s <= root.start_s), len(rows))
        if row == len(rows):
            rows.append(root)
            yield _name("thread_name", 1, row + 1, f"place {row + 1}")
        rows[row] = root
        yield _event(root, 1, row + 1, origin_s)
        for doing in partition(root.start_s, root.end_s, own):
            part = replace(root, kind=doing.kind, name=str(doing.kind), start_s=doing.start_s, end_s=doing.end_s)
            yield _event(replace(part, attributes={}), 1, row + 1, origin_s)
    for pid, (process, spans) in enumerate(sorted(by_process.items()), start=2):
        yield _name("process_name", pid, 0, process)
        yield from _rows_of(pid, spans, origin_s)


def _rows_of(pid: int, spans: Iterable[Span], origin_s: float) -> Iterator[dict[str, object]]:
    """A process's spans on rows in which any two are apart, or one is inside the other."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        row = next((number for number, open_ in enumerate(rows) if _fits(span, open_)), len(rows))
        if row == len(rows):
            rows.append([])
            yield _name("thread_name", pid, row + 1, f"row {row + 1}")
        rows[row].append(span)
        yield _event(span, pid, row + 1, origin_s)


def _fits(span: Span, open_: list[Span]) -> bool:
    """Whether a span can stand on a row: inside what is open there and of the same trace, or behind all of it."""
    while open_ and open_[-1].end_s <= span.start_s:
        open_.pop()
    return not open_ or (open_[-1].trace == span.trace and span.end_s <= open_[-1].end_s)


def _event(span: Span, pid: int, row: int, origin_s: float) -> dict[str, object]:
    """A complete event. Times are whole microseconds, of which both ends are rounded: what tiles goes on to tile."""
    start_us, end_us = (round(1e6 * (moment - origin_s)) for moment in (span.start_s, span.end_s))
    return {
        "ph": "X",
        "name": span.name,
        "cat": str(span.kind),
        "pid": pid,
        "tid": row,
        "ts": start_us,
        "dur": max(end_us - start_us, 0),
        "args": {"trace": span.trace, "id": span.id, "parent": span.parent, **span.attributes},
    }


def _name(what: str, pid: int, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": row, "args": {"name": name}}


def _pieces(events: Iterable[dict[str, object]]) -> Iterator[list[dict[str, object]]]:
    piece: list[dict[str, object]] = []
    for event in events:
        piece.append(event)
        if len(piece) == _IN_A_PIECE:
            yield piece
            piece = []
    if piece:
        yield piece


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
