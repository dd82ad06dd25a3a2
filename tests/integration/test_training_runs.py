from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.integration import runs
from tests.metric_table import documented_metrics, undocumented


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    result = runs.agentrl(
        *runs.train_arguments(folder, tiny_model, "steps=6", "evaluation.interval_steps=3", "evaluation.tasks=4",
                              "evaluation.final_tasks=6")
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "runs" / "test-seed0"


def test_a_run_trains_every_step_and_leaves_a_readable_folder(finished: Path) -> None:
    assert runs.state(finished)["status"] == "finished"
    steps = [row["step"] for row in runs.metrics(finished) if "time/train_step_s" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    for name in ("curve.png", "config.json", "ledger.jsonl", "episodes/train.jsonl", "tensorboard"):
        assert (finished / name).exists(), name


def test_evaluations_are_at_the_first_the_last_and_every_interval(finished: Path) -> None:
    evaluated = {row["step"]: row["eval/episodes"] for row in runs.metrics(finished) if "eval/episodes" in row}
    assert evaluated == {0: 6.0, 3: 4.0, 6: 6.0}


def test_every_dispatched_episode_has_exactly_one_ledger_line(finished: Path) -> None:
    lines = runs.rows(finished / "ledger.jsonl")
    counts = Counter(line["episode_id"] for line in lines)
    assert set(counts.values()) == {1}
    assert sum(line["outcome"] == "trained" for line in lines) == 6 * 8
    groups = {int(name.split("-")[1]) for name in counts}
    assert groups == set(range(max(groups) + 1)), "a task was skipped"


def test_consumed_episodes_are_rows_of_parquet_files_that_say_what_the_ledger_says(finished: Path) -> None:
    runs.assert_archived_as_in_ledger(finished)


def test_trainer_and_engine_agree_within_the_bound_of_the_gate(finished: Path) -> None:
    gaps = [r["trainer/fresh_gap_max_nats"] for r in runs.metrics(finished) if r.get("trainer/fresh_tokens")]
    assert gaps
    assert max(gaps) < 1e-3


def test_every_metric_of_a_run_is_in_the_table_and_what_is_counted_is_among_them(finished: Path) -> None:
    [events] = (finished / "tensorboard").glob("events.out.tfevents.*")
    shown = events.read_bytes()
    written = {name for row in runs.metrics(finished) for name in row} - {"step", "time"}
    assert undocumented(written) == set()
    assert {name for name in written if name.encode() not in shown} == set()
    counters = {name for name in documented_metrics() if name.startswith(("engines/", "requests/", "publish/"))}
    assert counters <= written
    steps = [row for row in runs.metrics(finished) if "time/train_step_s" in row]
    last = steps[-1]
    assert last["publish/receipts_total"] >= 2, "the first weights and at least one version"
    sent, loaded = (last[f"publish/{name}_bytes_total"] for name in ("sent", "loaded"))
    assert loaded > 0
    # Bytes are sent before they are loaded: at the moment of a step one version may be on its way.
    assert sent - loaded in (0, loaded / (last["publish/receipts_total"] - 1)), "each version has as many bytes"
    assert (last["engines/healthy"], last["engines/dead"], last["publish/failed_swap_total"]) == (1.0, 0.0, 0.0)
    totals = [name for name in last if name.endswith("_total")]
    assert [name for name in totals if sorted(row[name] for row in steps) != [row[name] for row in steps]] == []


def test_show_runs_and_eval_read_the_folder(finished: Path) -> None:
    shown = runs.agentrl("show", finished, "--kind", "heldout")
    assert "reward" in shown.stdout
    assert "sampled by 0.6" in shown.stdout
    listed = runs.agentrl("runs", finished.parent)
    assert "test-seed0" in listed.stdout
    assert "finished" in listed.stdout
    told = {name: runs.agentrl("runs", name, finished).stdout for name in ("ledger", "goodput", "bias")}
    assert "train-000000-0" in runs.agentrl("runs", "ledger", finished, "--last", "0").stdout
    assert [name for name, text in told.items() if "trained" not in text] == []
    evaluated = runs.agentrl("eval", finished, "--tasks", "6")
    assert "6 tasks" in evaluated.stdout, evaluated.stderr


def test_a_finished_run_is_not_resumed(finished: Path) -> None:
    result = runs.agentrl("resume", finished)
    assert result.returncode == 1
    assert "finished at version 0.6" in result.stderr


@pytest.mark.long
def test_after_sigkill_resume_goes_on_from_the_checkpoint_without_skipping_a_task(
    tiny_model: Path, tmp_path: Path
) -> None:
    process = runs.start(tmp_path, tiny_model, "steps=12")
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert runs.processes_are_gone(run), "engine or trainer outlived the run"
    resumed = runs.agentrl("resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.version(run) == {"epoch": 0, "step": 12}, "the redone weights are the lost ones"
    lines = runs.rows(run / "ledger.jsonl")
    assert set(Counter(line["episode_id"] for line in lines).values()) == {1}
    trained = [task_number(line) for line in lines if line["outcome"] == "trained"]
    progress = json.loads((run / "checkpoints" / "main" / "000012" / "progress.json").read_text())
    frontier = progress["frontiers"]["coin"]
    done = {*range(frontier["low"]), *frontier["done"]}
    assert Counter(trained) == dict.fromkeys(done, 4), "each task that is done was trained by its four episodes, once"


def task_number(line: dict) -> int:
    return int(line["task"].split("/")[-1])
