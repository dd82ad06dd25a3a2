from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOK = """
import agentrl, agentrl_environments.sql, agentrl_scaffolds.tool_calling
from importlib.resources import files
from agentrl import registry
print(agentrl.__file__)
print([p.target for g in (registry.ENVIRONMENTS, registry.SCAFFOLDS) for p in registry.list_plugins(g)])
print(sorted(f.name for f in files("agentrl_environments.sql").iterdir() if f.name.endswith(".toml")))
print(registry.load_plugin(registry.ENVIRONMENTS, "sql").name)
print([files(name).joinpath("py.typed").is_file() for name in ("agentrl", "agentrl_environments", "agentrl_scaffolds")])
"""


def look(site: Path | None, cwd: Path) -> list[str]:
    path = {} if site is None else {"PYTHONPATH": str(site)}
    result = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=cwd, env={**os.environ, **path}, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    wheel = next(folder.glob("agentrl-*.whl"))
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", str(site), str(wheel)], check=True)
    return site


def test_the_wheel_brings_plugins_and_recipes_under_their_own_names(wheel_site: Path, tmp_path: Path) -> None:
    origin, plugins, recipes, name, typed = look(wheel_site, tmp_path)
    assert origin.startswith(str(wheel_site))
    assert "agentrl_environments.sql:definition" in plugins
    assert "agentrl_scaffolds.tool_calling:ToolCalling" in plugins
    assert "demo.toml" in recipes
    assert name == "sql"
    assert typed == "[True, True, True]"
    assert not (wheel_site / "environments").exists()
    assert not (wheel_site / "tests").exists()


def test_the_wheel_and_the_editable_install_offer_the_same(wheel_site: Path, tmp_path: Path) -> None:
    editable = look(None, tmp_path)
    assert editable[0] == str(ROOT / "agentrl" / "__init__.py")
    assert editable[1:] == look(wheel_site, tmp_path)[1:]


def test_every_package_folder_is_in_the_wheel(wheel_site: Path) -> None:
    shipped = {path.parent.relative_to(wheel_site).as_posix() for path in wheel_site.rglob("__init__.py")}
    written = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "agentrl").rglob("__init__.py")}
    assert written <= shipped
