from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from expert_episode import play_expert

from agentrl.cli.main import app
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.envs.process import ProcessHost

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

FIND = """
import importlib.util, sys
print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])
"""
MAKE_RUN = """
import sys
from agentrl import registry
from agentrl.orchestration.config import load_run_config
from agentrl.orchestration.run_directory import RunDirectory
recipe = registry.shipped_file(registry.ENVIRONMENTS, "sql", "demo.toml")
RunDirectory.create(load_run_config(recipe, ["runs_folder=runs"]))
"""
MAX_BASE_MB = 250
# Commands that need the extra, with arguments that are as good as any: nothing is read before the extra is there.
TRAINING = {
    "demo": [],
    "warmstart": ["recipe.toml"],
    "train": ["recipe.toml"],
    "submit": ["recipe.toml", "--to", "ray"],
    "resume": ["run"],
    "eval": ["recipe.toml"],
    "engine": ["model", "--port", "1"],
    "show": ["run"],
    "replay": ["run", "1"],
    "runs check": ["run"],
    "model check": ["model"],
    "prm train": ["run", "--output", "prm"],
    "rescore": ["run", "--scorer", "prm"],
}
SERVING = {"env serve": ["sql"]}
READING = {
    *("doctor", "env list", "env run", "env check", "env init", "scaffold list", "scaffold init"),
    *("runs list", "runs ledger", "runs goodput", "runs bias"),
    *("jobs list", "jobs logs", "jobs stop", "runs trace", "plan"),
}


def look(site: Path | None, cwd: Path) -> list[str]:
    path = {} if site is None else {"PYTHONPATH": str(site)}
    result = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd=cwd, env={**os.environ, **path}, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def pip(python: Path | str, *arguments: Path | str) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "-w", folder, ROOT)
    return next(folder.glob("agentrl-*.whl"))


@pytest.fixture(scope="module")
def wheel_site(wheel: Path) -> Path:
    """The project's wheel, installed into a folder of its own."""
    site = wheel.with_name("site")
    pip(sys.executable, "install", "--no-deps", "--no-compile", "--target", site, wheel)
    return site


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Python of a fresh environment with the wheel and what it asks for, without extras."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder, with_pip=True)
    pip(folder / "bin" / "python", "install", "-c", ROOT / "constraints.txt", wheel)
    return folder / "bin" / "python"


def run_base(base: Path, cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What the base install's python does with some arguments, far from the sources."""
    return subprocess.run([base, *arguments], capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


def agentrl(base: Path, cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_base(base, cwd, base.with_name("agentrl"), *arguments)


def commands(group: Any, *path: str) -> Iterator[str]:
    """All commands of the command line, as they are typed."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield " ".join((*path, name))


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


def test_the_base_install_is_small_and_has_no_torch(base: Path, tmp_path: Path) -> None:
    (site,) = base.parents[1].glob("lib/python*/site-packages")
    size = subprocess.run(["du", "-sm", site], capture_output=True, text=True, check=True)
    assert int(size.stdout.split()[0]) <= MAX_BASE_MB
    found = run_base(base, tmp_path, "-c", FIND, "agentrl", "torch", "transformers", "tokenizers", "pyarrow")
    assert found.stdout.strip() == "['agentrl']"


def test_an_environment_worker_of_the_base_install_plays_an_episode(base: Path, tmp_path: Path) -> None:
    played = run_base(base, tmp_path, Path(__file__).with_name("expert_episode.py"), "sql")
    assert (played.returncode, played.stdout) == (0, "1.0\n"), played.stderr


async def test_a_run_with_torch_plays_episodes_in_workers_of_the_base_install(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # else the worker finds the sources here
    host = await build_host(EnvironmentConfig(name="sql", interpreter=base), 30.0, tmp_path)
    assert isinstance(host, ProcessHost)
    try:
        assert await play_expert(host, "sql") == 1.0
        (worker,) = host._all
        assert Path(f"/proc/{worker.pid}/cmdline").read_text().split("\0")[0] == str(base)
    finally:
        await host.close()


def test_the_base_install_reads_recipes_runs_and_plugins(base: Path, tmp_path: Path) -> None:
    made = run_base(base, tmp_path, "-c", MAKE_RUN)
    assert made.returncode == 0, made.stderr
    runs = agentrl(base, tmp_path, "runs")
    assert (runs.returncode, "sql-demo-seed0" in runs.stdout) == (0, True), runs.stderr
    plugins = agentrl(base, tmp_path, "env", "list")
    assert (plugins.returncode, "agentrl_environments.sql:definition" in plugins.stdout) == (0, True), plugins.stderr
    of_groups = {"model check", "prm train", "runs check"}
    assert set(TRAINING) <= set(agentrl(base, tmp_path, "--help").stdout.split()) | of_groups


@pytest.mark.parametrize("command", sorted(TRAINING))
def test_a_command_that_needs_the_extra_says_how_to_install_it(base: Path, tmp_path: Path, command: str) -> None:
    refused = agentrl(base, tmp_path, *command.split(), *TRAINING[command])
    assert (refused.returncode, refused.stdout) == (1, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: this command needs the extra 'train': pip install 'agentrl[train]' (not installed: ")
    assert "torch" in line


@pytest.mark.parametrize("command", sorted(SERVING))
def test_a_command_that_needs_the_server_says_how_to_install_it(base: Path, tmp_path: Path, command: str) -> None:
    refused = agentrl(base, tmp_path, *command.split(), *SERVING[command])
    assert (refused.returncode, refused.stdout) == (1, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: this command needs the extra 'serve': pip install 'agentrl[serve]' (not installed: ")
    assert "fastapi" in line


def test_the_doctor_of_the_base_install_says_what_training_needs(base: Path, tmp_path: Path) -> None:
    report = agentrl(base, tmp_path, "doctor")
    assert (report.returncode, report.stderr) == (1, "")
    bad = [line for line in report.stdout.splitlines() if line.startswith("BAD") and "torch" in line]
    assert len(bad) == 1
    assert bad[0].endswith("are not installed; pip install 'agentrl[train]'")


def test_every_command_is_known_to_need_the_extra_or_not() -> None:
    assert set(commands(typer.main.get_command(app))) == READING | set(TRAINING) | set(SERVING)
