from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.buffer.frontier import FrontierState
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_directory import Progress, RunDirectory, RunState, RunStatus
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import PolicyVersion

V3 = PolicyVersion(0, 3)


def config(folder: Path) -> RunConfig:
    table = {
        "name": "demo",
        "seed": 7,
        "steps": 5,
        "runs_folder": folder,
        "policies": {"main": {"model": folder / "model"}},
        "environment": {"name": "sql"},
    }
    return RunConfig.model_validate(table)


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(config(tmp_path))


def checkpoint(run: RunDirectory, step: int, complete: bool = True) -> Path:
    folder = run.checkpoint("main", step)
    folder.mkdir(parents=True)
    (folder / "weights").write_text("")
    if complete:
        run.write_progress(
            folder,
            Progress({"main": PolicyVersion(0, step)}, {"sql": FrontierState(step, (step + 2,))}, 17, number=step),
        )
    return folder


def staged(run: RunDirectory, *versions: PolicyVersion) -> None:
    for version in versions:
        run.weights("main", version).mkdir(parents=True)


def test_runs_are_numbered_and_never_overwritten(tmp_path):
    names = [RunDirectory.create(config(tmp_path)).path.name for _ in range(3)]
    assert names == ["demo-seed7", "demo-seed7-2", "demo-seed7-3"]


def test_an_opened_run_knows_the_configuration_that_it_was_started_with(run, tmp_path):
    assert RunDirectory.open(run.path).config() == config(tmp_path)


def test_what_is_no_run_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"is no run folder: config\.json is missing; `agentrl runs` lists"):
        RunDirectory.open(tmp_path)


def test_a_configuration_that_no_longer_fits_names_file_and_key(run):
    file = run.path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "stepps": 3}))
    with pytest.raises(ConfigError, match=r"config\.json: unknown key 'stepps'; did you mean 'steps'"):
        run.config()


def test_a_run_that_never_started_has_no_state_and_one_that_did_reads_it_back(run):
    assert run.state() is None
    state = RunState(RunStatus.FAILED, {"main": V3}, "engine 0 died")
    run.write_state(state)
    assert run.state() == state


def test_a_state_is_replaced_as_a_whole_or_not_at_all(run, monkeypatch):
    run.write_state(RunState(RunStatus.RUNNING, {"main": V3}))

    def power_loss(*_arguments) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", power_loss)
    with pytest.raises(KeyboardInterrupt):
        run.write_state(RunState(RunStatus.FINISHED, {"main": V3}))
    monkeypatch.undo()
    assert run.state() == RunState(RunStatus.RUNNING, {"main": V3})
    run.write_state(RunState(RunStatus.FINISHED, {"main": V3}))
    assert run.state().status is RunStatus.FINISHED
    assert list(run.path.glob("*.new")) == []


def test_the_latest_checkpoint_is_the_newest_complete_one(run):
    assert run.latest_checkpoint() is None
    checkpoint(run, 2)
    folder = checkpoint(run, 10)
    checkpoint(run, 12, complete=False)
    path, progress = next(run.checkpoints())
    assert path == folder
    assert list(progress.digests) == ["weights"]
    known = replace(progress, digests={})
    assert known == Progress({"main": PolicyVersion(0, 10)}, {"sql": FrontierState(10, (12,))}, 17, number=10)


def test_pruning_keeps_the_newest_complete_checkpoints(run):
    for step in (2, 4, 10):
        checkpoint(run, step)
    checkpoint(run, 12, complete=False)
    run.prune_checkpoints("main", keep=2)
    assert sorted(path.name for path in (run.path / "checkpoints" / "main").iterdir()) == ["000004", "000010", "000012"]
    assert sorted(path.name for path in (run.path / "progress" / "main").iterdir()) == ["000004.json", "000010.json"]


def test_pruning_keeps_the_checkpoint_that_the_process_has_begun_from(run):
    for step in (2, 4, 10):
        checkpoint(run, step)
    run.prune_checkpoints("main", keep=1, begun_from=run.saved("main", PolicyVersion(0, 2)))
    assert sorted(path.name for path in (run.path / "checkpoints" / "main").iterdir()) == ["000002", "000010"]
    assert sorted(path.name for path in (run.path / "progress" / "main").iterdir()) == ["000002.json", "000010.json"]


def test_pruning_keeps_the_newest_weights_and_what_is_pinned(run):
    staged(run, *(PolicyVersion(0, step) for step in (1, 2, 9, 10)), PolicyVersion(1, 3))
    (run.path / "weights" / "main" / "1.4.staging").mkdir()
    run.prune_weights("main", keep=2, pinned={str(run.weights("main", PolicyVersion(0, 2)))})
    assert {p.name for p in (run.path / "weights" / "main").iterdir()} == {"0.2", "0.10", "1.3", "1.4.staging"}


def test_the_newest_model_is_staged_or_saved_or_the_first(run, tmp_path):
    assert run.newest_model("main") == tmp_path / "model"
    folder = checkpoint(run, 4)
    assert run.newest_model("main") == folder
    staged(run, PolicyVersion(0, 9), PolicyVersion(0, 10))
    assert run.newest_model("main") == run.weights("main", PolicyVersion(0, 10))


def test_adapters_that_are_staged_are_no_model(run, tmp_path):
    staged(run, PolicyVersion(0, 9))
    folder = checkpoint(run, 4)
    file = run.path / "config.json"
    table = json.loads(file.read_text())
    table["policies"]["main"]["trainer"]["lora"] = {"rank": 4}
    table["policies"]["main"]["publish"]["transport"] = {"kind": "adapter"}
    file.write_text(json.dumps(table))
    assert run.newest_model("main") == folder


def test_the_last_metric_is_the_newest_that_has_the_name(run):
    assert run.last_metric("eval/reward_mean") is None
    run.metrics.write_text('{"step": 1, "eval/reward_mean": 0.25}\n{"step": 2}\n')
    assert run.last_metric("eval/reward_mean") == 0.25
    assert run.last_metric("none") is None


def test_a_damaged_state_names_its_file(run):
    (run.path / "state.json").write_text('{"status": "walking"}')
    with pytest.raises(StorageError, match=r"state\.json is damaged"):
        run.state()


def test_a_place_that_cannot_be_written_is_named_with_a_remedy(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"run folder .*file/demo-seed7 cannot be written.*choose another runs_fol"):
        RunDirectory.create(config(tmp_path / "file"))
    (run.path / "state.json").mkdir()
    with pytest.raises(StorageError, match=r"state\.json cannot be written.*; free space, then resume the run"):
        run.write_state(RunState(RunStatus.RUNNING, {"main": V3}))
