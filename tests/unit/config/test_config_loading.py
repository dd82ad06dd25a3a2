from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.loading import _apply, load_table
from agentrl.types.errors import ConfigError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text('name = "demo"\nsteps = 10\n[trainer.optimizer]\nkind = "sgd"\nlearning_rate = 0.1\n')
    return file


def test_a_recipe_reads_as_its_table(recipe):
    optimizer = {"kind": "sgd", "learning_rate": 0.1}
    assert load_table(recipe) == {"name": "demo", "steps": 10, "trainer": {"optimizer": optimizer}}


def test_an_override_changes_one_value_and_leaves_its_neighbours(recipe):
    table = load_table(recipe, ["trainer.optimizer.learning_rate=1e-6"])
    assert table["trainer"]["optimizer"] == {"kind": "sgd", "learning_rate": 1e-6}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("true", True),
        ('"3"', "3"),
        ("second", "second"),
        ("models/sql", "models/sql"),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(recipe, text, value):
    assert load_table(recipe, [f"policies.main.x={text}"])["policies"]["main"]["x"] == value


def test_the_last_override_of_a_key_wins(recipe):
    assert load_table(recipe, ["steps=1", "steps=2"])["steps"] == 2


@given(st.lists(st.text("abc_", min_size=1, max_size=3), min_size=1, max_size=4), st.integers())
def test_an_override_puts_its_value_at_the_end_of_its_path(keys, value):
    table: dict = {}
    _apply(table, f"{'.'.join(keys)}={value}")
    for key in keys:
        table = table[key]
    assert table == value


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=1", ".a=1", "a.=1", ""])
def test_an_override_without_key_or_value_is_refused(recipe, override):
    with pytest.raises(ConfigError, match="not of the form"):
        load_table(recipe, [override])


def test_an_override_below_a_value_is_refused(recipe):
    with pytest.raises(ConfigError, match="'name' is a value, not a section"):
        load_table(recipe, ["name.first=x"])


def test_an_override_finds_a_table_of_a_list_by_its_name(tmp_path):
    file = tmp_path / "lists.toml"
    file.write_text('[[a.scorers]]\nkind = "verifier"\n[[a.scorers]]\nname = "prm"\nmodel = "first"\n')
    changed = load_table(file, ["a.scorers.prm.model=second", "a.scorers.prm.pool.most=2"])
    assert changed == {
        "a": {"scorers": [{"kind": "verifier"}, {"name": "prm", "model": "second", "pool": {"most": 2}}]}
    }
    for override, says in {
        "a.scorers.judge.model=x": "no 'judge' in scorers; there is prm",
        "a.scorers.prm=x": "'scorers' is a list",
    }.items():
        with pytest.raises(ConfigError, match=says):
            load_table(file, [override])


@pytest.mark.parametrize("content", [b"name = ", b"[a\n", b"a = 1\na = 2\n", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path, content):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml is not a TOML file"):
        load_table(file)


def test_a_missing_recipe_is_told_with_where_recipes_are(tmp_path):
    with pytest.raises(ConfigError, match=r"no recipe at .*none\.toml; .*sql/demo"):
        load_table(tmp_path / "none.toml")


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(ConfigError, match="is not a TOML file"):
        load_table(tmp_path)
