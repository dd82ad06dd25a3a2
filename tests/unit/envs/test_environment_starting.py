from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from agentrl import __version__
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.envs.starting import WorkerCommand, start_worker
from agentrl.types.errors import ConfigError

NAME = "agentrl.testing.environments:faulty"


def command(folder: Path, name: str = "sql", python: Path | str = sys.executable, **terms) -> WorkerCommand:
    return WorkerCommand(name, {}, folder, Path(python), **terms)


def program(path: Path, text: str) -> Path:
    """A program of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python_that_also_finds(packages: Path, path: Path) -> Path:
    """This Python, to which `packages` are installed as well."""
    return program(path, f'PYTHONPATH="{packages}:$PYTHONPATH" exec {sys.executable} "$@"')


def write_module(folder: Path, name: str, head: str) -> str:
    """A module with the faulty environment behind other lines; returns how recipes name it."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(f"{head}\nfrom agentrl.testing.environments import faulty as environment\n")
    return f"{name}:environment"


async def test_an_interpreter_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(
        ConfigError, match=r"environment\.interpreter: no Python at /nowhere/python; give the path of one"
    ):
        await start_worker(command(tmp_path, python="/nowhere/python"), 0)
    plain = tmp_path / "python"
    plain.write_text("no program")
    with pytest.raises(ConfigError, match=f"no Python at {plain}"):
        await start_worker(command(tmp_path, python=plain), 0)
    plain.chmod(0o755)
    with pytest.raises(ConfigError, match=f"'sql': no worker could be started by {plain}: .*Exec format error"):
        await start_worker(command(tmp_path, python=plain), 0)


async def test_an_interpreter_without_agentrl_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    monkeypatch.chdir(tmp_path)  # else the sources are found here
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ConfigError, match=r"'sql' cannot be loaded by (?s:.)*No module named 'agentrl'") as refused:
        await start_worker(command(tmp_path, python=python), 0)
    assert f"{python} -m pip install agentrl=={__version__}" in str(refused.value)


async def test_an_environment_that_is_not_installed_is_refused_by_name_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"'sqll' cannot be loaded by .*did you mean 'sql'\?; install its package"):
        await start_worker(command(tmp_path, "sqll"), 0)


async def test_an_interpreter_with_another_agentrl_is_refused_with_both_versions(tmp_path):
    other = write_module(tmp_path / "there", "older", "import agentrl\nagentrl.__version__ = '0.0.9'")
    python = python_that_also_finds(tmp_path / "there", tmp_path / "python")
    with pytest.raises(ConfigError, match=rf"it has agentrl 0\.0\.9 and this run has {__version__}; install agentrl"):
        await start_worker(command(tmp_path, other, python), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo out of memory >&2; exit 1", r"its process ended \(exit code 1\); install .*(?s:.)*out of memory"),
        ("exit 0", r"its process ended \(exit code 0\); install"),
    ],
)
async def test_a_program_that_is_no_python_is_refused_with_its_last_words(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        await start_worker(command(tmp_path, python=program(tmp_path / "python", text)), 0)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("import not_installed", r"No module named 'not_installed'; .*install its package here, or name a Python that"),
        ("import sys\nprint('no licence', file=sys.stderr)\nraise RuntimeError('refused')", "RuntimeError: refused; "),
        ("import sys, os\nprint('no licence', file=sys.stderr, flush=True)\nos._exit(3)", r"ended \(exit code 3\); "),
        ("import time\ntime.sleep(3600)", r"not done within 0\.5 s; what is slow or waits belongs into `create`"),
    ],
    ids=["lacks", "raises", "exits", "hangs"],
)
async def test_an_import_that_fails_is_named_with_the_end_of_what_it_wrote(tmp_path, monkeypatch, head, message):
    name = write_module(tmp_path / "there", "failing", head)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"), prepend=":")
    with pytest.raises(ConfigError, match=f"environment '{name}' cannot be loaded by .*{message}") as refused:
        await build_host(EnvironmentConfig(name=name), 5.0, tmp_path, start_s=0.5 if "sleep" in head else 60.0)
    assert ("no licence" in str(refused.value)) == ("no licence" in head)
    assert str(tmp_path / "environment-0.log") in str(refused.value)
