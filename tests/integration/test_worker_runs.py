"""Whole runs whose episodes are played by worker processes."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import runs

from agentrl.journal.reading import read_journal

BAD = "scaffold.name=tests.storms.bad_scaffolds:Bad"


def test_a_seeded_run_in_turn_is_bit_identical_twice_and_in_any_number_of_processes(
    tiny_model: Path, tmp_path: Path
) -> None:
    outcomes = []
    for name, workers in (("first", 0), ("second", 0), ("processes", 2)):
        folder = tmp_path / name
        folder.mkdir()
        overrides = ("buffer.max_staleness=0", "seed=5", f"rollout.workers={workers}")
        ended = runs.agentrl(*runs.train_arguments(folder, tiny_model, *overrides))
        assert ended.returncode == 0, ended.stderr
        run = folder / "runs" / "test-seed5"
        ends = [(e["episode_id"], e["reward"], e["sampled_tokens"], e["step"]) for e in runs.rows(run / "ledger.jsonl")]
        outcomes.append((runs.weights(run), sorted(ends), [row["trainer/loss"] for row in runs.metrics(run)]))
        assert runs.metrics(run)[-1]["workers/running"] == max(workers, 1)
        assert runs.processes_of(run) == []
    assert outcomes[0] == outcomes[1], "twice in this process"
    assert outcomes[0] == outcomes[2], "in others"


def test_a_run_parks_in_processes_and_goes_on_in_another_number_of_them(tiny_model: Path, tmp_path: Path) -> None:
    busy = ("rollout.limits.max_reply_tokens=400", "buffer.max_staleness=100")  # the engine never waits
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, "rollout.workers=2", *busy)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 2, process)
    runs.wait_for_requests(run)
    for pid in {process.pid, *runs.processes_of(run)}:
        with suppress(ProcessLookupError):  # it has ended with one of the others
            os.kill(pid, signal.SIGTERM)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == runs.STOPPED, output
    assert runs.processes_are_gone(run)
    histories = read_journal(run / "journal").lives
    parked = {name: history for name, history in histories.items() if history.ended is None}
    assert any(history.parts for history in parked.values()), "replies in the making are on record"
    step = runs.version(run)["step"]
    config = re.sub(r'"steps": \d+', f'"steps": {step + 3}', (run / "config.json").read_text())
    (run / "config.json").write_text(re.sub(r'"workers": \d+', '"workers": 1', config))
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    after = read_journal(run / "journal").lives
    for name, history in parked.items():
        before = [token for part in history.parts for token in part.generation.token_ids.tolist()]
        nodes = after[name].episode().nodes
        assert not nodes or nodes[-1].token_ids.tolist()[: len(before)] == before, f"{name} lost tokens that it had"
    counts = Counter(line["episode_id"] for line in runs.rows(run / "ledger.jsonl"))
    assert set(counts.values()) == {1}
    assert set(parked) <= set(counts)


def test_a_scaffold_that_exits_costs_its_episodes_and_the_run_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    options = 'scaffold.options={fault="exit", words=["count 1"]}'
    overrides = (BAD, options, "steps=2", "rollout.max_attempts=1", "evaluation.final_tasks=3")
    ended = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, *overrides))
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "test-seed0"
    lines = runs.rows(run / "ledger.jsonl")
    assert set(Counter(line["episode_id"] for line in lines).values()) == {1}
    failed = {line["episode_id"] for line in lines if line["reason"] == "scaffold_crashed"}
    assert failed
    assert {name.rpartition("-")[0] for name in failed} == {"train-000001"}, "only those of the task at which it exits"
    assert max(row.get("workers/given_up_total", 0) for row in runs.metrics(run)) >= 1
    evaluations = [row for row in runs.metrics(run) if "eval/episodes" in row]
    assert [(row["eval/episodes"], row["eval/failed_episodes"]) for row in evaluations] == [(2, 1)] * 2
