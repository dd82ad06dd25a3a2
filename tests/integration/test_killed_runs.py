from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.journal.entries import SCHEMA
from agentrl.journal.reading import read_journal
from agentrl.journal.segments import SegmentFile
from agentrl.process.crash_points import VARIABLE
from agentrl.types.version import VersionSpan
from tests.integration import runs

pytestmark = pytest.mark.long

SIX_OPTIMIZER_STEPS = ("policies.main.algorithm.minibatches=3", "policies.main.algorithm.epochs=2")


def sampled(run: Path) -> dict[str, tuple[float, int]]:
    return {line["episode_id"]: (line["reward"], line["sampled_tokens"]) for line in runs.rows(run / "ledger.jsonl")}


def test_a_seeded_run_in_turn_is_bit_identical_across_kill_and_resume(tiny_model: Path, tmp_path: Path) -> None:
    # With one optimizer step it is a run with forks that is killed (test_forked_runs).
    (tmp_path / "whole").mkdir()
    overrides = ("buffer.max_staleness=0", "seed=5", "checkpoint.interval_steps=4", *SIX_OPTIMIZER_STEPS)
    process = runs.start(tmp_path, tiny_model, *overrides, runs.ENDLESS)
    run = tmp_path / "runs" / "test-seed5"
    runs.wait_for_step(run, 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert runs.processes_are_gone(run)
    steps = runs.last_step(run) + 3
    runs.end_at(run, steps)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    ended = runs.agentrl(*runs.train_arguments(tmp_path / "whole", tiny_model, *overrides, f"steps={steps}"))
    assert ended.returncode == 0, ended.stderr
    whole = tmp_path / "whole" / "runs" / "test-seed5"
    assert runs.weights(run) == runs.weights(whole)
    assert sampled(run) == sampled(whole)


@pytest.mark.parametrize("told", ["the run", "all processes of its job"])
def test_a_run_that_is_stopped_is_saved_and_parks_its_episodes_with_the_tokens_that_they_have(
    tiny_model: Path, tmp_path: Path, told: str
) -> None:
    seldom = "checkpoint.interval_steps=50000"
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, "rollout.limits.max_reply_tokens=400", seldom)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 2, process)
    runs.wait_for_requests(run)
    for pid in [process.pid] if told == "the run" else {process.pid, *runs.processes_of(run)}:
        with suppress(ProcessLookupError):  # the run has ended it meanwhile
            os.kill(pid, signal.SIGTERM)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == runs.STOPPED, output
    assert runs.state(run)["status"] == "stopped"
    assert runs.processes_of(run) == []
    histories = read_journal(run / "journal").lives
    parked = {name: history for name, history in histories.items() if history.ended is None}
    assert parked, "with eight places some episode is always in flight"
    assert any(history.parts for history in parked.values()), "replies in the making are on record"
    ledger = runs.rows(run / "ledger.jsonl")
    assert not {line["episode_id"] for line in ledger} & set(parked)
    step = runs.version(run)["step"]
    assert step >= 2, "it was saved where it stopped"
    runs.end_at(run, step + 3)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.version(run) == {"epoch": 0, "step": step + 3}
    after = read_journal(run / "journal").lives
    for name, history in parked.items():
        before = [token for part in history.parts for token in part.generation.token_ids.tolist()]
        nodes = after[name].episode().nodes
        if nodes:
            assert nodes[-1].token_ids.tolist()[: len(before)] == before, f"{name} lost tokens that it had"
    counts = Counter(line["episode_id"] for line in runs.rows(run / "ledger.jsonl"))
    assert set(counts.values()) == {1}
    assert set(parked) <= set(counts)


def kill_with_replies_of_new_weights(process: subprocess.Popen[str], run: Path, within_s: float = 300.0) -> None:
    """Kill a run while a whole reply, of weights made since the checkpoint, is on record that no step has taken.

    The first weights are the checkpoint's. The run stands still while its record is read: else a step could take
    these replies between the look and the kill.
    """
    until = time.monotonic() + within_s
    while True:
        os.killpg(process.pid, signal.SIGSTOP)
        if any(span.version.step for span in untaken_spans(run)):
            break
        os.killpg(process.pid, signal.SIGCONT)
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)


def untaken_spans(run: Path) -> list[VersionSpan]:
    journal = read_journal(run / "journal")
    taken = {name for entry in journal.taken for _, names in entry.groups for name in names}
    turns = [turned for name, history in journal.lives.items() if name not in taken for turned in history.turns]
    samples = [node.sample for turned in turns for node in turned.nodes if node.sample is not None]
    return [span for sample in samples for span in sample.versions]


def test_weights_that_come_out_otherwise_are_of_a_new_epoch_and_nothing_is_lost(
    tiny_model: Path, tmp_path: Path
) -> None:
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, "checkpoint.interval_steps=50000")
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 4, process)
    kill_with_replies_of_new_weights(process, run)
    process.communicate()
    assert runs.processes_are_gone(run)
    config = (run / "config.json").read_text().replace('"ranks": 1', '"ranks": 2')
    (run / "config.json").write_text(config)  # sums over two ranks round otherwise
    steps = runs.last_step(run) + 5
    runs.end_at(run, steps)
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert "the weights differ from the lost ones: going on as version 1." in resumed.stdout
    assert runs.version(run) == {"epoch": 1, "step": steps}
    assert [row["step"] for row in runs.metrics(run) if "batch/trained_tokens" in row] == list(range(1, steps + 1))
    orphans = [row["buffer/orphaned_fraction"] for row in runs.metrics(run) if "batch/trained_tokens" in row]
    assert max(orphans) > 0, "tokens of the lost weights are counted"
    assert orphans[-1] == 0.0
    assert set(Counter(line["episode_id"] for line in runs.rows(run / "ledger.jsonl")).values()) == {1}


def test_a_second_process_on_a_run_is_refused_and_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS)
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 1, process)
    second = runs.agentrl("resume", run)
    assert second.returncode == 1
    assert f"is in use by process {process.pid}" in second.stderr
    step = runs.metrics(run)[-1]["step"]
    runs.wait_for_step(run, step + 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == runs.STOPPED


@pytest.fixture(scope="module")
def killed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed behind its seventh step and is to make a few more; read only."""
    folder = tmp_path_factory.mktemp("killed")
    process = runs.start(folder, tiny_model, runs.ENDLESS, "checkpoint.interval_steps=2")
    run = folder / "runs" / "test-seed0"
    runs.wait_for_step(run, 7, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert runs.processes_are_gone(run)
    runs.end_at(run, runs.last_step(run) + 5)
    return run


def test_a_damaged_journal_is_named_and_salvaged(killed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(killed, tmp_path / "runs" / killed.name)
    segment = max((run / "journal").glob("worker-0-*.journal"))
    data = bytearray(segment.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    segment.write_bytes(data)
    for index in (run / "journal").glob("index*"):
        index.unlink()
    refused = runs.agentrl("resume", run)
    assert refused.returncode == 1
    assert f"journal segment {segment} is damaged at bytes" in refused.stderr
    assert "--salvage" in refused.stderr
    salvaged = runs.agentrl("resume", run, "--salvage")
    assert salvaged.returncode == 0, salvaged.stderr
    assert runs.version(run) == {"epoch": 1, "step": runs.last_step(killed) + 5}
    assert set(Counter(line["episode_id"] for line in runs.rows(run / "ledger.jsonl")).values()) == {1}
    assert len(list(run.glob("journal.damaged-*"))) == 1, "the damaged one is kept"
    assert list((run / "episodes").glob("consumed-*.parquet"))


def test_a_journal_of_a_newer_program_is_refused_by_name(killed: Path, tmp_path: Path) -> None:
    run = shutil.copytree(killed, tmp_path / "runs" / killed.name)
    segment = SegmentFile.create(run / "journal" / "buffer-00000002.journal", 2)
    segment.append([(SCHEMA + 1, 19, bytes(16))])
    segment.sync()
    segment.close()
    refused = runs.agentrl("resume", run)
    assert refused.returncode == 1
    assert "install the version that wrote it" in refused.stderr


@pytest.mark.parametrize(("point", "ending"), [("run.ended", -signal.SIGKILL), ("archive.drafted", 1)])
def test_a_run_that_dies_at_its_end_is_completed_without_engines_and_trainer(
    tiny_model: Path, tmp_path: Path, point: str, ending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind its last step, or left by its archiver in the only archiving that it begins."""
    monkeypatch.setenv(VARIABLE, point)
    overrides = ("steps=4", "checkpoint.interval_steps=100")
    ended = runs.agentrl(*runs.train_arguments(tmp_path, tiny_model, *overrides))
    monkeypatch.delenv(VARIABLE)
    run = tmp_path / "runs" / "test-seed0"
    assert (ended.returncode, runs.state(run)["status"]) == (ending, "unarchived"), ended.stderr
    assert "unarchived" in runs.agentrl("runs", run.parent).stdout
    assert runs.processes_are_gone(run, within_s=60.0)
    logs = {path: path.read_bytes() for path in run.glob("logs/*") if not path.name.startswith("archiver")}
    assert {path.name for path in logs} >= {"engine-main-0.log", "trainer-main-0.log"}
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    [said] = resumed.stdout.splitlines()
    assert "episodes of its ledger were missing in the archive and are there now" in said
    started = {path for path in run.glob("logs/*") if not path.name.startswith("archiver")}
    assert {path: path.read_bytes() for path in started} == logs, "nothing but the archiver was started"
    assert runs.state(run)["status"] == "finished"
    runs.assert_archived_as_in_ledger(run)
    again = runs.agentrl("resume", run)
    assert (again.returncode, "nothing is left to resume" in again.stderr) == (1, True)
