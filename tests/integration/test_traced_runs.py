"""The trace of a real run, read by a reader that knows nothing of how it was written, and its page for Prometheus."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import urllib.request
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import runs
from prometheus_client.parser import text_string_to_metric_families

KINDS = {"generation", "waiting_for_weights", "environment", "scoring", "queue"}
OVERRIDES = (
    "environment.options={turns=3, step_s=0.03, score_s=0.05}",
    "rollout.workers=2",
    "rollout.limits.max_turns=3",
    "rollout.limits.max_reply_tokens=60",
    "telemetry.metrics_port=0",
)
NUM_STEPS = 14  # so many that the run still goes on when it is asked for its page
ROUNDED_S = 2e-6  # both ends of an event are whole microseconds
TICK_S = 1e-3  # uvloop's clock for sleeps counts whole milliseconds, so a sleep ends up to one early
BESIDE_S = 0.02  # what lies between the clocks of record and trace: handing a request to another process
SHARE = 0.9  # of the episodes; now and then a busy processor comes between the two


@pytest.fixture(scope="module")
def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with publications that interrupt generation, and what it served while it went on."""
    folder = tmp_path_factory.mktemp("traced")
    process = runs.start(folder, tiny_model, f"steps={NUM_STEPS}", *OVERRIDES, output=(folder / "output").open("w"))
    run = folder / "runs" / "test-seed0"
    runs.wait_for_step(run, 3, process)
    url = re.search(r"http://127.0.0.1:\d+/metrics", (folder / "output").read_text())
    assert url is not None
    page = urllib.request.urlopen(url[0], timeout=30).read().decode()
    assert process.wait(timeout=200) == 0, (folder / "output").read_text()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return run, families


def events_of(run: Path) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    return trace["traceEvents"]


def test_a_trace_follows_the_rules_of_chrome_s_format(traced) -> None:
    rows: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    named = set()
    for event in events_of(traced[0]):
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["name"]
        assert event["cat"]
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
        assert event["ts"] >= 0 <= event["dur"]
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {("thread_name", *row) for row in rows} <= named
    assert {("process_name", pid, 0) for pid, _ in rows} <= named
    for row in rows.values():
        open_: list[int] = []  # ends of the events that a moment is inside of
        for start, end in sorted(row, key=lambda event: (event[0], -event[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1], "two events of a row overlap and neither is inside the other"
            open_.append(end)


def episodes_on_disk(run: Path) -> set[str]:
    """Episodes that have ended, by what is written of them while a run goes on."""
    lines = [line for path in (run / "traces").glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    spans = [json.loads(line) for line in lines if line.endswith("\n")]
    return {span["name"] for span in spans if span["kind"] == "episode"}


def seconds_by_episode(run: Path) -> dict[str, dict[str, float]]:
    """Seconds of each kind, by episode; every moment of an episode is in exactly one of its stretches."""
    events = events_of(run)
    (pid,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "episodes")
    own = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
    stretches: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in own:
        if event["cat"] != "episode":
            stretches[event["args"]["trace"]].append(event)
    found = {}
    for episode in (event for event in own if event["cat"] == "episode"):
        parts = sorted(stretches.pop(episode["name"]), key=lambda part: part["ts"])
        assert {part["cat"] for part in parts} <= KINDS
        assert {part["tid"] for part in parts} == {episode["tid"]}
        at = episode["ts"]
        for part in parts:
            assert part["ts"] == at, "a gap, or two at once"
            at += part["dur"]
        assert at == episode["ts"] + episode["dur"]
        seconds: defaultdict[str, float] = defaultdict(float)
        for part in parts:
            seconds[part["cat"]] += part["dur"] / 1e6
        found[episode["name"]] = {**seconds, "all": episode["dur"] / 1e6}
    assert not stretches
    return found


def test_every_second_of_an_episode_is_in_one_kind_and_they_agree_with_its_record(traced) -> None:
    run, _ = traced
    found = seconds_by_episode(run)
    ledger = {line["episode_id"]: line for line in runs.rows(run / "ledger.jsonl")}
    assert set(found) == set(ledger)
    records = {row["ticket"]["episode_id"]: row for row in runs.rows(run / "episodes" / "train.jsonl")}
    assert len(records) >= 8
    gaps_s, late_s = [], []
    for name, record in records.items():
        drawn_s = sum(turn["generation_s"] for turn in record["turns"])
        traced_s = found[name].get("generation", 0.0) + found[name].get("waiting_for_weights", 0.0)
        # The record's clock runs around the trace's, and what is between them is none of the other kinds.
        assert -ROUNDED_S * len(record["turns"]) <= drawn_s - traced_s <= found[name]["queue"] + ROUNDED_S, name
        gaps_s.append(drawn_s - traced_s)
        acted_s = sum(turn["environment_s"] for turn in record["turns"])
        assert found[name].get("environment", 0.0) == pytest.approx(acted_s, abs=BESIDE_S), name
        if record["failure"] is None:
            late_s.append(found[name]["scoring"] - 0.05)
    assert sum(gap <= BESIDE_S for gap in gaps_s) >= SHARE * len(gaps_s), gaps_s
    assert min(late_s) >= -TICK_S - ROUNDED_S
    assert sum(late <= BESIDE_S for late in late_s) >= SHARE * len(late_s), late_s
    of_steps = {
        n: s["environment"] for n, s in found.items() if ledger[n]["outcome"] == "trained" and "environment" in s
    }
    assert sum(of_steps.values()) == pytest.approx(sum(ledger[n]["tool_s"] for n in of_steps), rel=0.1)
    assert sum(seconds.get("waiting_for_weights", 0.0) for seconds in found.values()) > 0.0


def test_generation_waits_for_weights_where_its_reply_was_aborted(traced) -> None:
    run, _ = traced
    found = seconds_by_episode(run)
    records = runs.rows(run / "episodes" / "train.jsonl")
    aborted = [r["ticket"]["episode_id"] for r in records if any(turn["aborts"] for turn in r["turns"])]
    whole = [r["ticket"]["episode_id"] for r in records if not any(turn["aborts"] for turn in r["turns"])]
    assert aborted
    assert all(found[name].get("waiting_for_weights", 0.0) > 0.0 for name in aborted)
    assert sum(found[name].get("waiting_for_weights", 0.0) == 0.0 for name in whole) > len(whole) / 2


def test_steps_publications_and_workers_are_on_the_trace(traced) -> None:
    events = events_of(traced[0])
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"episodes", "run", "worker-1", "worker-2"}
    roots = [
        e["name"] for e in events if e["ph"] == "X" and e["cat"] in ("step", "publish") and not e["args"]["parent"]
    ]
    assert [name for name in roots if "step" in name] == [f"main/step 0.{step}" for step in range(1, NUM_STEPS + 1)]
    assert any(name.startswith("main/publish 0.") for name in roots)
    ids = {event["args"]["id"] for event in events if event["ph"] == "X"}
    orphans = {e["name"] for e in events if e["ph"] == "X" and e["args"]["parent"] not in ids | {""}}
    assert orphans <= {"tool_call", "generation"}, "a turn that its run's end cut off has no end on record"


def test_a_run_serves_what_it_counts(traced) -> None:
    run, families = traced
    samples = [sample for family in families.values() for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}

    def value(name: str, **labels: str) -> float:
        return values[name, frozenset(labels.items())]

    steps = value("agentrl_steps_total", policy="main")
    assert steps >= 3
    assert value("agentrl_policy_step", policy="main") == steps
    assert value("agentrl_goal_steps") == NUM_STEPS
    assert value("agentrl_workers_running") == 2
    assert value("agentrl_engines", policy="main", state="healthy") == 1
    assert [v for (name, _), v in values.items() if name == "agentrl_engine_up"] == [1]
    assert value("agentrl_staleness_bound_steps", policy="main") == 1
    rows = [row for row in runs.metrics(run) if row["step"] <= steps]
    trained = sum(row["batch/trained_tokens"] for row in rows)
    assert value("agentrl_trained_tokens_total", policy="main") == trained
    assert sum(v for (name, _), v in values.items() if name == "agentrl_episodes_total") >= 8 * steps
    info = families["agentrl_run_info"].samples[0]
    assert (info.labels["run"], info.labels["runtime"]) == (run.name, "local")


@pytest.mark.long
def test_a_run_that_was_killed_has_a_trace_of_what_it_had_done(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, *OVERRIDES)
    run = tmp_path / "runs" / "test-seed0"
    # A process that is killed loses its last second of spans, in which a fast machine takes all its steps so far.
    runs.wait_until(lambda: len(episodes_on_disk(run)) >= 8, process)
    on_disk = episodes_on_disk(run)
    pids = {process.pid, *runs.processes_of(run)}
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended with one of the others
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert runs.processes_are_gone(run)
    written = runs.agentrl("runs", "trace", run)
    assert written.returncode == 0, written.stderr
    assert "episodes" in written.stdout
    assert on_disk <= set(seconds_by_episode(run))
