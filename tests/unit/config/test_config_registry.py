from __future__ import annotations

import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from agentrl.registry import ENVIRONMENTS, SCAFFOLDS, Plugin, is_shipped, list_plugins, load_plugin, shipped_file
from agentrl.types.errors import ConfigError

GROUP = "agentrl.tests"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a distribution that registers names, without a package manager."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(distribution: str, **entries: str) -> None:
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))

    return add


def test_a_registered_name_loads_its_object(install):
    install("plug", joiner="os.path:join")
    assert load_plugin(GROUP, "joiner") is __import__("os").path.join


def test_listing_names_owner_and_target_and_imports_nothing(install):
    install("plug", zeta="plugin_that_is_not_there:x", alpha="another_that_is_not_there:y")
    assert list_plugins(GROUP) == [
        Plugin("alpha", "another_that_is_not_there:y", "plug"),
        Plugin("zeta", "plugin_that_is_not_there:x", "plug"),
    ]
    assert "plugin_that_is_not_there" not in sys.modules


def test_ten_thousand_names_are_listed_with_one_look_at_the_metadata_of_their_distribution(install, monkeypatch):
    install("plug", **{f"name_{number}": f"module_{number}:x" for number in range(10_000)})
    looks = []
    read = PathDistribution.read_text
    monkeypatch.setattr(
        PathDistribution, "read_text", lambda self, name: looks.append((self, name)) or read(self, name)
    )
    assert len(list_plugins(GROUP)) == 10_000
    paths = [distribution._path for distribution, name in looks if name == "METADATA"]
    assert len([path for path in paths if path.name == "plug-1.0.dist-info"]) <= 2  # one more to tell doubles apart


def test_the_built_in_environment_is_found_like_any_other():
    assert Plugin("sql", "agentrl_environments.sql:definition", "agentrl") in list_plugins(ENVIRONMENTS)


def test_what_comes_with_agentrl_is_told_from_what_others_wrote_and_not_imported(install):
    install("plug", joiner="plugin_that_is_not_there:join")
    assert is_shipped(SCAFFOLDS, "tool_calling")
    assert is_shipped(SCAFFOLDS, "agentrl_scaffolds.tool_calling:ToolCalling")
    assert not is_shipped(SCAFFOLDS, "my_scaffolds.tools:Mine")
    assert not is_shipped(GROUP, "joiner")
    with pytest.raises(ConfigError, match="did you mean 'tool_calling'"):
        is_shipped(SCAFFOLDS, "tool_caling")


def test_an_unknown_name_is_answered_with_the_nearest(install):
    install("plug", joiner="os.path:join")
    with pytest.raises(ConfigError, match=r"no plugin 'joinre' in agentrl\.tests; did you mean 'joiner'\?"):
        load_plugin(GROUP, "joinre")


def test_a_name_like_no_other_is_answered_with_what_is_registered(install):
    install("plug", joiner="os.path:join")
    with pytest.raises(ConfigError, match="registered: joiner"):
        load_plugin(GROUP, "zzz")
    with pytest.raises(ConfigError, match="registered: none"):
        load_plugin("agentrl.nothing", "zzz")


def test_a_name_that_two_distributions_claim_is_ambiguous(install):
    install("one", joiner="os.path:join")
    install("two", joiner="posixpath:split")
    with pytest.raises(ConfigError, match=r"more than once: .*\(one\).*\(two\)"):
        load_plugin(GROUP, "joiner")


def test_a_target_may_be_named_directly():
    assert load_plugin(GROUP, "collections:OrderedDict.fromkeys") is not None


@pytest.mark.parametrize("target", ["no_such_module:x", "os.path:no_such_name", "os:"])
def test_a_target_that_cannot_be_loaded_is_a_configuration_error(target):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_plugin(GROUP, target)


def test_a_file_beside_a_plugin_is_found_without_importing_it(install, tmp_path):
    install("plug", mine="shipping_plugin:x")
    (tmp_path / "shipping_plugin").mkdir()
    (tmp_path / "shipping_plugin" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "shipping_plugin" / "demo.toml").write_text("steps = 1")
    assert shipped_file(GROUP, "mine", "demo.toml").read_text() == "steps = 1"
    assert "shipping_plugin" not in sys.modules


@pytest.mark.parametrize("target", ["os.path:join", "no_such_module:x"])
def test_a_file_that_does_not_lie_beside_a_plugin_is_named(install, target):
    install("plug", mine=target)
    with pytest.raises(ConfigError, match=r"'mine' in agentrl\.tests ships no demo\.toml"):
        shipped_file(GROUP, "mine", "demo.toml")


def test_the_demo_finds_its_recipes_wherever_it_is_installed():
    assert 'name = "sql-demo"' in shipped_file(ENVIRONMENTS, "sql", "demo.toml").read_text()
