from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli.main import app
from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.warmstart_config import load_warmstart_config


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def run_there(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a made package, which is found as if it were installed."""
    paths = os.pathsep.join((str(folder), *sys.path))
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_environment_that_was_made_keeps_its_promises_and_passes_its_own_tests(tmp_path: Path):
    made = call("env", "init", "word-sums", "--folder", str(tmp_path))
    assert made.exit_code == 0, made.output
    folder = tmp_path / "word-sums"
    assert {str(file) for file in folder.rglob("*") if file.is_file()} <= set(made.output.splitlines())
    checked = run_there(folder, "agentrl.cli.main", "env", "check", "word_sums:definition", "--tasks", "3")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "gold 1.00" in checked.stdout
    tested = run_there(folder, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    assert tested.returncode == 0, tested.stdout
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"agentrl.environments": {"word_sums": "word_sums:definition"}}


def test_its_recipes_are_recipes(tmp_path: Path):
    assert call("env", "init", "word-sums", "--folder", str(tmp_path)).exit_code == 0
    code = tmp_path / "word-sums" / "word_sums"
    trained, taught = load_run_config(code / "train.toml", []), load_warmstart_config(code / "warmstart.toml", [])
    assert set(trained.environments) == {taught.environment.name} == {"word_sums"}
    assert str(trained.policies["main"].model) == str(taught.output)


def test_a_scaffold_that_was_made_passes_its_own_tests(tmp_path: Path):
    made = call("scaffold", "init", "careful", "--folder", str(tmp_path))
    assert made.exit_code == 0, made.output
    tested = run_there(tmp_path / "careful", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    assert tested.returncode == 0, tested.stdout


def test_scaffolds_are_listed_as_environments_are():
    listed = call("scaffold", "list")
    names = [line.split()[0] for line in listed.output.splitlines()]
    shipped = ["bash", "code_act", "compaction", "multi_agent", "react", "tool_calling", "turn_taking"]
    assert [name for name in names if name in shipped] == shipped


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("env", "1st", "error: '1st' cannot be a package's name; use letters, digits and '-'"),
        ("env", "../up", "cannot be a package's name"),
        ("scaffold", "class", "cannot be a package's name"),
        ("scaffold", "", "cannot be a package's name"),
    ],
)
def test_a_name_that_no_module_can_have_is_refused(kind: str, name: str, said: str, tmp_path: Path):
    result = call(kind, "init", name, "--folder", str(tmp_path / "new"))
    assert result.exit_code == 1
    assert said in result.output
    assert not (tmp_path / "new").exists()


def test_a_folder_that_exists_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    result = call("env", "init", "mine", "--folder", str(tmp_path))
    assert result.exit_code == 1
    assert f"error: {tmp_path / 'mine'} exists; choose another name, or remove it" in result.output.replace("\n", "")
    assert list((tmp_path / "mine").iterdir()) == []
