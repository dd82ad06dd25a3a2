from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import click
import pytest
import typer

from agentrl import registry
from agentrl.cli.main import app
from agentrl.models.verified import markdown_table
from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.warmstart_config import load_warmstart_config
from tests.metric_table import documented_metrics, undocumented

MAX_PROTOCOL_LINES = 400
SEAMS = (
    "Engine", "Environment", "Scaffold", "RolloutWorker", "Scorer", "EpisodeBuffer", "Trainer", "Publisher",
    "WeightTransport", "Runtime", "MetricSink",
)  # fmt: skip
RECIPES = sorted(Path(__file__).parents[2].glob("environments/*/*.toml"))


def test_every_seam_is_on_one_page(platform):
    page = next(module for module in platform if module.name == "agentrl.protocols")
    assert len(page.text.splitlines()) <= MAX_PROTOCOL_LINES
    assert set(SEAMS) <= {node.name for node in page.classes()}


def test_every_make_target_that_the_readme_names_exists(root):
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for words in _commands(root) if words[0] == "make"}
    assert named, "the README shows no make command"
    assert named <= targets, f"no such targets: {sorted(named - targets)}"


def test_every_command_that_the_readme_names_exists(root):
    named = [words[1:] for words in _commands(root) if words[0] == "agentrl"]
    assert named, "the README shows no agentrl command"
    for words in named:
        command: click.Command | None = typer.main.get_command(app)
        while hasattr(command, "commands") and words:
            assert words[0] in command.commands, f"no command 'agentrl {' '.join(words)}'"
            command, words = command.commands[words[0]], words[1:]
        options = {option for parameter in command.params for option in parameter.opts}
        unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in options]
        assert not unknown, f"{command.name} has no {unknown}"


def test_every_recipe_that_the_readme_names_exists(root):
    named = re.findall(r"environments/\S+\.toml", (root / "README.md").read_text())
    assert [path for path in named if not (root / path).is_file()] == []


def test_every_file_that_the_plan_names_exists(root):
    text = (root / "agentrl" / "README.md").read_text()
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+(?:\.py|\.md)?)`", text)) - {"area/quantity_unit"}
    assert len(named) > 30
    places = (root / "agentrl", root)
    assert sorted(path for path in named if not any((place / path).exists() for place in places)) == []


def test_every_package_is_in_the_plan(root):
    text = (root / "agentrl" / "README.md").read_text()
    packages = {path.parent.name for path in (root / "agentrl").glob("*/__init__.py")}
    assert sorted(package for package in packages if f"`{package}`" not in text) == []


def test_there_are_recipes():
    assert {path.name for path in RECIPES} >= {"warmstart.toml", "demo.toml"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_is_a_valid_configuration(recipe):
    is_run = "policies" in tomllib.loads(recipe.read_text())
    if is_run:
        played = {section.name for section in load_run_config(recipe, []).environments.values()}
    else:
        played = {load_warmstart_config(recipe, []).environment.name}
    assert played <= {plugin.name for plugin in registry.list_plugins(registry.ENVIRONMENTS)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_says_how_it_is_run(recipe, root):
    is_run = "policies" in tomllib.loads(recipe.read_text())
    command = f"# agentrl {'train' if is_run else 'warmstart'} {recipe.relative_to(root)}"
    assert any(line.startswith(command) for line in recipe.read_text().splitlines()), f"no line '{command}'"


def test_every_metric_that_the_code_names_is_in_the_table(platform):
    areas = {name.partition("/")[0] for name in documented_metrics()}
    named = re.compile(f"({'|'.join(sorted(areas))})/[a-z0-9_]*[a-z0-9]")
    constants = {
        node.value
        for module in platform
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert undocumented({text for text in constants if named.fullmatch(text)}) == set()


def _commands(root: Path) -> list[list[str]]:
    """Words of every command line in the README's code blocks that calls make or agentrl."""
    blocks = re.findall(
        r"^```(?:bash|sh|console)?\n(.*?)^```", (root / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    lines = [line.partition(" #")[0].removeprefix("$ ").split() for block in blocks for line in block.splitlines()]
    return [words for words in lines if len(words) > 1 and words[0] in ("make", "agentrl")]


def test_the_readme_has_the_table_of_verified_models(root):
    assert markdown_table() in (root / "README.md").read_text()
