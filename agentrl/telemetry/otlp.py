"""Spans as OpenTelemetry's, sent in batches by OTLP over HTTP; imported only where a recipe asks for it.

A trace's id is made of the run's folder and of the episode's id, and a span's id is its own, so that the processes of a
run, each of which sends its own spans, speak of the same ones.
"""

from __future__ import annotations

import hashlib

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags

from agentrl.telemetry.spans import Span

_SEND_S = 10.0
_WAITING_SPANS = 2**15
_NS = 10**9


class OtlpSink:
    """Sends spans to a collector from a thread of its own; what it cannot send within 10 s is lost, and logged."""

    def __init__(self, endpoint: str, run: str, process: str) -> None:
        self._run = run
        names = {"service.name": "agentrl", "service.instance.id": process, "agentrl.run": run}
        self._resource = Resource.create(names)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S)
        self._processor = BatchSpanProcessor(exporter, max_queue_size=_WAITING_SPANS)

    def write(self, span: Span) -> None:
        """Put a span in the line."""
        trace_id = int.from_bytes(hashlib.blake2b(f"{self._run}/{span.trace}".encode(), digest_size=16).digest())
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=self._context(trace_id, span.id),
                parent=self._context(trace_id, span.parent) if span.parent else None,
                resource=self._resource,
                attributes={"agentrl.kind": str(span.kind), "agentrl.trace": span.trace, **span.attributes},
                start_time=round(span.start_s * _NS),
                end_time=round(span.end_s * _NS),
            )
        )

    def close(self) -> None:
        """Send what is in the line; safe to call twice. Waits for: the collector, 10 s at most for each batch."""
        self._processor.shutdown()

    @staticmethod
    def _context(trace_id: int, span_id: str) -> SpanContext:
        return SpanContext(trace_id, int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
