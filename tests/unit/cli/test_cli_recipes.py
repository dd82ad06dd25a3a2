from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import agentrl_environments.sql
from agentrl.cli.main import app
from agentrl.cli.recipes import find_recipe
from agentrl.types.errors import ConfigError

SHIPPED = Path(agentrl_environments.sql.__file__).parent


def fails(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.parametrize("name", ["sql/demo", "sql/demo.toml"])
def test_a_recipe_is_found_by_the_name_of_its_environment(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path(name)) == SHIPPED / "demo.toml"


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "demo").write_text("")
    assert find_recipe(Path("sql/demo")) == Path("sql/demo")


def test_a_recipe_that_an_environment_does_not_ship_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"ships no nothing.toml"):
        find_recipe(Path("sql/nothing"))


def test_recipes_of_the_other_command_are_told_apart():
    assert "`agentrl warmstart" in fails("train", "sql/warmstart")
    assert "`agentrl train" in fails("warmstart", "sql/demo")


def test_the_version_is_printed():
    assert CliRunner().invoke(app, ["--version"]).output.startswith("agentrl 0.")
