"""Environments that the run's process never imports: their facts, tasks, episodes and recovery come by a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl import codec
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_described_host, build_host
from agentrl.envs.process import ProcessHost
from agentrl.journal.entries import EnvironmentStarted, Intended
from agentrl.journal.history import EpisodeHistory
from agentrl.protocols import EnvironmentHost
from agentrl.rollouts.environment_recovery import open_environment
from agentrl.testing.builders import build_ticket
from agentrl.types.environment import EnvironmentDescription, Opening, Recovery
from agentrl.types.episode import Effect
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Split, Task

NAME = "apart:environment"
MODULE = """
import os, sys
from dataclasses import replace
from pathlib import Path
from agentrl.testing.environments import faulty
Path(os.environ["IMPORTED_BY"]).open("a").write(f"{os.getpid()} {sys.executable}\\n")
environment = replace(
    faulty, name="apart", is_deterministic=True, external_tools=frozenset({"send"}), num_tasks=lambda options: 40
)
"""
DESCRIPTION = EnvironmentDescription(
    "apart", Recovery(is_deterministic=True, external_tools=frozenset({"send"})), num_tasks=40
)
OPENING = Opening((Message(Role.USER, "count"),), (ToolSpec("query", "Query."),))


def call(tool: str) -> Message:
    return Message(Role.ASSISTANT, "", (ToolCall("0", tool, {"n": 1}),))


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the process that has imported the environment in each line."""
    monkeypatch.setenv("IMPORTED_BY", str(tmp_path / "imported"))
    return tmp_path / "imported"


def packages(folder: Path, **modules: str) -> Path:
    """A folder with these modules."""
    folder.mkdir()
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def python_with(found: Path, path: Path) -> Path:
    """This Python, to which the packages in a folder are installed as well."""
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{found}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def cut_off_over(tool: str) -> SimpleNamespace:
    """The log of an episode whose worker was lost as the environment was to act."""
    pending = Intended(1, 0, (Effect("train-000000-0/0", call(tool).tool_calls[0]),))
    history = EpisodeHistory(build_ticket(), (), 1, opened=EnvironmentStarted(1, OPENING), pending=pending)
    return SimpleNamespace(history=history, token=2)


async def use(host: EnvironmentHost) -> None:
    """All that a run wants of an environment: tasks, an episode, one that is resumed, and none that acts twice."""
    tasks = await host.sample(Split.TRAIN, 7, range(80))
    assert sorted(task.ordinal for task in tasks[40:]) == list(range(40))
    async with host.open(tasks[0]) as environment:
        assert await environment.start() == OPENING
        assert (await environment.step(call("query"))).messages[0].content == "{'n': 1}"
        assert (await environment.score()).reward == 1.0
    async with open_environment(host, tasks[0], cut_off_over("query")) as resumed:
        assert await resumed.start() == OPENING
        assert (await resumed.step(call("query"))).messages[0].content == "{'n': 1}"
    with pytest.raises(EpisodeError, match="whether send was carried out is not on record; never repeated"):
        async with open_environment(host, tasks[0], cut_off_over("send")):
            pass


async def test_a_run_uses_an_environment_that_only_its_workers_import(tmp_path, monkeypatch, imports):
    found = packages(tmp_path / "packages", apart=MODULE)
    monkeypatch.syspath_prepend(str(found))
    monkeypatch.setenv("PYTHONPATH", str(found), prepend=":")
    host = await build_host(EnvironmentConfig(name=NAME), 30.0, tmp_path)
    assert host.description == DESCRIPTION
    await use(host)
    await host.close()
    importers = [int(line.split()[0]) for line in imports.read_text().splitlines()]
    assert len(importers) == 1, "the process that gives the description plays the episodes"
    assert os.getpid() not in importers
    assert "apart" not in sys.modules


async def test_a_run_uses_an_environment_that_its_own_python_cannot_import(tmp_path, imports):
    found = packages(tmp_path / "packages", apart="import only_there\n" + MODULE, only_there="")
    python = python_with(found, tmp_path / "python")
    with pytest.raises(ConfigError, match=r"'apart:environment' cannot be loaded by .*No module named 'apart'"):
        await build_host(EnvironmentConfig(name=NAME), 30.0, tmp_path)
    host = await build_host(EnvironmentConfig(name=NAME, interpreter=python), 30.0, tmp_path)
    assert host.description == DESCRIPTION
    await use(host)
    await host.close()
    with pytest.raises(ModuleNotFoundError, match="No module named 'apart'"):
        __import__("apart")


async def test_workers_run_in_the_python_that_the_definition_names_unless_the_recipe_names_one(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    found = packages(tmp_path / "packages", only_there="")
    python = python_with(found, tmp_path / "python")
    head = f"from pathlib import Path\nfrom dataclasses import replace\nPYTHON = Path({str(python)!r})\n"
    tail = (
        "from agentrl.testing.environments import faulty, FaultyEnvironment\n"
        "def create(options, task):\n    import only_there\n    return FaultyEnvironment(options, task)\n"
        "environment = replace(faulty, create=create, interpreter=PYTHON)\n"
    )
    there = packages(tmp_path / "there", apart=head + tail)
    monkeypatch.setenv("PYTHONPATH", str(there), prepend=":")
    host = await build_host(EnvironmentConfig(name=NAME), 30.0, tmp_path / "logs")
    assert host.description.interpreter == str(python)
    async with host.open(Task("faulty", Split.TRAIN, 0)) as environment:
        assert await environment.start() == OPENING
    await host.close()
    mine = EnvironmentConfig(name=NAME, interpreter=Path(sys.executable))
    other = await build_host(mine, 30.0, tmp_path / "logs")
    with pytest.raises(EpisodeError, match="No module named 'only_there'"):
        async with other.open(Task("faulty", Split.TRAIN, 0)):
            pass
    await other.close()


def test_a_description_that_is_known_starts_no_worker(tmp_path):
    host = build_described_host(EnvironmentConfig(name=NAME), DESCRIPTION, 30.0, tmp_path)
    assert isinstance(host, ProcessHost)
    assert (host.description, list(tmp_path.iterdir())) == (DESCRIPTION, [])


def test_a_description_crosses_process_borders():
    assert codec.decode(codec.encode(DESCRIPTION), EnvironmentDescription) == DESCRIPTION


def test_an_environment_has_one_place():
    with pytest.raises(ValueError, match=r"placement is inline, but 'sql' is to run in /opt/python; leave one out"):
        EnvironmentConfig(name="sql", placement="inline", interpreter=Path("/opt/python"))
