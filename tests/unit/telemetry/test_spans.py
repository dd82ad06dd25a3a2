"""Spans of an episode: whose they are, how requests are cut, and files that a kill cuts off."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentrl.telemetry.config import TelemetryConfig
from agentrl.telemetry.opening import check_telemetry, open_span_sink
from agentrl.telemetry.run_traces import RunTraces
from agentrl.telemetry.span_files import SpanFile, read_spans
from agentrl.telemetry.spans import Asked, EpisodeTrace, Span, SpanKind, unix_s
from agentrl.telemetry.trace_events import write_trace


class Kept:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def write(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        return


def stretches(spans: Sequence[Span], *kinds: str) -> list[tuple[str, float, float]]:
    def since(unix: float) -> float:
        return round(unix - unix_s(0.0), 6)

    return [(s.name, since(s.start_s), since(s.end_s)) for s in spans if s.kind in kinds]


def test_requests_are_cut_where_their_engine_stood_still_and_what_lies_between_is_waiting_too():
    kept = Kept()
    trace = EpisodeTrace("e", kept)
    cut_short = Asked(10.0, 14.0, ((3.0, 4.5),), tokens=7)  # the engine's stand ends behind the answer
    resumed = Asked(14.5, 20.0, ((0.0, 1.5), (1.0, 2.0)), tokens=9)
    trace.replied(0, "agent", [cut_short, resumed])
    trace.acted(0, 20.0, 21.0, ["query"])
    trace.close()
    assert stretches(kept.spans, "generation", "waiting_for_weights") == [
        ("generation", 10.0, 13.0),
        ("waiting_for_weights", 13.0, 14.0),
        ("waiting_for_weights", 14.0, 14.5),
        ("waiting_for_weights", 14.5, 16.0),
        ("waiting_for_weights", 16.0, 16.5),
        ("generation", 16.5, 20.0),
    ]
    assert stretches(kept.spans, "turn") == [("turn 0", 10.0, 21.0)]


def test_each_span_has_the_parent_that_it_is_part_of_in_whichever_process_it_was_written():
    worker, driver = Kept(), Kept()
    playing = EpisodeTrace("e", worker)
    playing.replied(0, "agent", [Asked(1.0, 2.0)])
    playing.acted(0, 2.0, 3.0, ["query"])
    playing.add(SpanKind.SCORING, "score.verifier", 3.0, 4.0)
    playing.close()
    traces = RunTraces(driver, 1)
    traces.begin("e")
    traces.of("e").add(SpanKind.SCORING, "score.prm", 2.0, 2.5, 0)
    traces.end("e", outcome="answered")
    by_name = {span.name: span for span in (*worker.spans, *driver.spans)}
    parents = {name: span.parent for name, span in by_name.items()}
    episode, turn = by_name["e"].id, by_name["turn 0"].id
    assert parents == {
        "e": "",
        "turn 0": episode,
        "generation": turn,
        "tool_call": turn,
        "score.verifier": episode,
        "score.prm": turn,
    }
    assert len({span.id for span in by_name.values()}) == len(by_name)


def test_what_is_on_record_and_comes_again_is_not_traced_twice():
    kept = Kept()
    trace = EpisodeTrace("e", kept)
    trace.restored(1)
    trace.replied(0, "agent", [Asked(1.0, 1.0)])
    trace.replied(1, "agent", [Asked(1.0, 2.0)])
    trace.close()
    assert [span.name for span in kept.spans if span.kind is SpanKind.TURN] == ["turn 1"]


def test_only_the_first_episodes_are_traced_and_the_others_are_counted():
    kept = Kept()
    traces = RunTraces(kept, 2)
    for name in ("a", "b", "c"):
        traces.begin(name)
        traces.end(name)
    assert [span.trace for span in kept.spans] == ["a", "b"]
    assert traces.metrics() == {"trace/traced_episodes_total": 2.0, "trace/left_out_episodes_total": 1.0}


def test_a_file_that_a_kill_cut_off_is_read_up_to_there_and_its_episode_has_no_end(tmp_path: Path):
    file = SpanFile(tmp_path / "traces", "worker-1")
    trace = EpisodeTrace("e", file)
    for turn in range(3):
        trace.replied(turn, "agent", [Asked(float(turn), turn + 1.0)])
    trace.close()
    file.close()
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-30])
    assert len(list(read_spans(tmp_path / "traces"))) == whole.count(b"\n") - 1
    size = write_trace(tmp_path)
    assert size is not None
    assert (size.episodes, size.open_episodes) == (1, 1)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    (episode,) = [event for event in events if event.get("cat") == "episode"]
    assert episode["args"]["outcome"] == "no end on record"


def test_a_damaged_line_is_left_out_and_the_others_make_a_trace(tmp_path: Path):
    file = SpanFile(tmp_path / "traces", "run")
    EpisodeTrace("e", file).ended(0.0)
    file.close()
    whole = file.path.read_text()
    late = whole.replace('"start_s":', '"start_s":1e300,"was":')
    file.path.write_text(late + whole.replace("episode", "epiXode", 1) + "\x00\n" + whole)
    size = write_trace(tmp_path)
    assert size is not None
    assert (size.episodes, size.spans) == (1, 1)


def test_a_disk_that_does_not_answer_holds_up_no_span(tmp_path: Path):
    """A pipe that nobody reads stands for it: whoever opens it to write waits."""
    file = SpanFile(tmp_path, "run")
    os.mkfifo(file.path)
    for number in range(3000):
        EpisodeTrace(f"episode-{number}", file).ended(0.0)
    received: list[bytes] = []
    reader = Thread(target=lambda: received.append(file.path.read_bytes()))
    reader.start()
    file.close()
    reader.join(10.0)
    assert b"episode-0" in received[0]


def test_what_cannot_be_written_is_lost_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "traces").write_text("no folder")
    file = SpanFile(tmp_path / "traces", "run")
    for _ in range(2):
        EpisodeTrace("e", file).ended(0.0)
        file.close()
    (record,) = caplog.records
    assert record.message.endswith("the trace misses what comes from here on")


def test_a_folder_without_spans_has_no_trace(tmp_path: Path):
    assert write_trace(tmp_path) is None


def test_a_collector_gets_an_episode_as_one_trace_with_its_parents(tmp_path: Path):
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            data = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            received.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        config = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces")
        check_telemetry(config)
        sink = open_span_sink(config, tmp_path, "worker-1")
        assert sink is not None
        trace = EpisodeTrace("e", sink)
        trace.replied(0, "agent", [Asked(1.0, 2.0, tokens=5)])
        trace.close()
        trace.ended(0.5, outcome="answered")
        EpisodeTrace("other", sink).ended(0.5)
        sink.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    resources = [spans for request in received for spans in request.resource_spans]
    spans = {span.name: span for resource in resources for scope in resource.scope_spans for span in scope.spans}
    assert spans.keys() == {"generation", "turn 0", "e", "other"}
    assert spans["e"].parent_span_id == b""
    assert spans["turn 0"].parent_span_id == spans["e"].span_id
    assert spans["generation"].parent_span_id == spans["turn 0"].span_id
    assert spans["generation"].end_time_unix_nano - spans["generation"].start_time_unix_nano == pytest.approx(
        1e9, abs=1e4
    )
    assert len({spans[name].trace_id for name in ("generation", "turn 0", "e")}) == 1
    assert spans["other"].trace_id != spans["e"].trace_id
    named = {a.key: a.value.string_value for resource in resources for a in resource.resource.attributes}
    assert named["agentrl.run"] == tmp_path.name
    assert named["service.instance.id"] == "worker-1"
