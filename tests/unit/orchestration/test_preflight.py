"""What is looked at before a run starts, and what is left for later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.config.base import parse_config
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.preflight import check_resumed, check_run, visible_gpus
from agentrl.types.errors import ConfigError


def config_of(model: Path, **sections: object) -> RunConfig:
    table = {
        "name": "test",
        "steps": 1,
        "environment": {"name": "sql"},
        "policies": {"main": {"model": str(model)}},
        "rollout": {"limits": {"max_context_tokens": 512}},
        **sections,
    }
    return parse_config(RunConfig, table, "recipe.toml")


def devices(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("nodes", "chosen", "found"),
    [
        ((), None, 0),
        (("null", "nvidiactl", "nvidia-uvm"), None, 0),
        (("nvidia0", "nvidia1", "nvidia10", "nvidiactl"), None, 3),
        (("nvidia0", "nvidia1"), "1", 1),
        (("nvidia0",), "0,1,2", 1),
        (("nvidia0",), "", 0),
        (("nvidia0",), "-1", 0),
        (("kfd",), None, None),
        (("dxg",), "0", 1),
    ],
)
def test_gpus_are_counted_by_the_files_of_their_drivers(nodes, chosen, found, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus(devices(tmp_path, *nodes)) == found


def test_a_sound_recipe_passes(tiny_model: Path):
    check_run(config_of(tiny_model))


def test_a_run_that_began_goes_on_whatever_its_lengths(tiny_model: Path):
    config = config_of(tiny_model, rollout={"limits": {"max_context_tokens": 513}})
    check_resumed(config)
    with pytest.raises(ConfigError, match=r"rollout\.limits\.max_context_tokens is 513"):
        check_run(config)


def test_a_scaffold_of_others_is_looked_for_and_not_imported(tiny_model: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "scaffold_that_hangs.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_run(config_of(tiny_model, scaffold={"name": "scaffold_that_hangs:Agent"}))
    assert "scaffold_that_hangs" not in sys.modules


def test_a_module_in_the_working_folder_is_found_as_worker_processes_find_it(tiny_model: Path, tmp_path, monkeypatch):
    (tmp_path / "own_game.py").write_text("")
    with pytest.raises(ConfigError, match="there is no module own_game"):
        check_run(config_of(tiny_model, environment={"name": "own_game:definition"}))
    monkeypatch.chdir(tmp_path)
    check_run(config_of(tiny_model, environment={"name": "own_game:definition"}))


def test_a_plugin_that_is_installed_in_any_way_is_found_by_its_module(tiny_model: Path):
    check_run(config_of(tiny_model, environment={"name": "agentrl_environments.sql:definition"}))


def test_names_of_another_interpreter_are_left_to_it(tiny_model: Path):
    check_run(config_of(tiny_model, environment={"name": "only_there", "interpreter": sys.executable}))
