from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from tests.unit.cli.bad_case import RECIPE

LATENCIES = """
[engine]
tokens_per_s = { 1 = 50, 64 = 1600 }
[environment]
step_s = { median = 0.1, p95 = 0.1 }
[trainer]
fixed_s = 60.0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "latencies.toml").write_text(LATENCIES)
    return tmp_path / "recipe.toml"


def plan(recipe: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", str(recipe), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_plan_names_the_bottleneck_and_where_each_latency_is_from(recipe: Path):
    said = plan(recipe, "--latencies", str(recipe.with_name("latencies.toml")), "--set", "publish.load_s=3")
    assert "bottleneck: trainer" in said
    by_name = {line.split("  ")[0]: line.split()[-1] for line in said.splitlines() if line.strip()}
    assert by_name["trainer fixed s"].endswith("latencies.toml")
    assert by_name["publish s"] == "--set"
    assert by_name["stage s"] == "default"
    assert "of 64 places" in said


def test_gpus_are_shared_out_and_the_best_split_is_named(recipe: Path):
    said = plan(recipe, "--rough", "--set", "trainer.fixed_s=0.1", "--set", "trainer.tokens_per_s=1e6", "--gpus", "3")
    assert "best split of 3 GPUs: 2 engines, 1 rank of the trainer" in said


def test_a_shipped_recipe_can_be_planned_by_name(recipe: Path):
    assert "steps an hour" in plan(Path("sql/demo"), "--rough", "buffer.groups_per_step=2")
