"""Packages of others, each in an environment of its own that ``make test-adapters`` installs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.process.ports import free_port
from tests.servers.process import running_server

ROOT = Path(__file__).parents[2]
SIDE = ROOT / "tests/adapters/openenv_side"
START_S = 240.0
VERSIONS = ("0.10", "0.3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them: they are run where the packages are."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.adapters)


def openenv_python(version: str) -> Path:
    """The interpreter that has OpenEnv of this version."""
    python = ROOT / f".venv-openenv-{version}/bin/python"
    assert python.exists(), f"{python} is not there; run `make test-adapters`, which installs it"
    return python


def packages_python() -> Path:
    """The interpreter that has the packages of environments, and the base of agentrl."""
    python = ROOT / ".venv-packages/bin/python"
    assert python.exists(), f"{python} is not there; run `make test-adapters`, which installs it"
    return python


@pytest.fixture
def beside_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter that has packages of others find agentrl and its environments in this folder."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / '.venv/packages'}")


@contextmanager
def echo_server(*arguments: str, folder: Path) -> Iterator[str]:
    """Run agentrl's server of `tests/servers/echo.py` by its command; gives its URL."""
    port = free_port()
    command = [sys.executable, "-m", "agentrl.cli.main", "env", "serve", "tests.servers.echo:echo", "--port", str(port)]
    with running_server([*command, *arguments], port, folder / "log", START_S) as url:
        yield url


@pytest.fixture(scope="session", params=VERSIONS)
def openenv_version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def openenv_server(
    openenv_version: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Iterator[str]]:
    """Runs OpenEnv's own server of an environment for so many sessions; gives its URL."""

    @contextmanager
    def serving(environment: str, sessions: int) -> Iterator[str]:
        port, folder = free_port(), tmp_path_factory.mktemp("openenv")
        command = [openenv_python(openenv_version), SIDE / "serve.py", environment, port, sessions]
        with running_server([str(part) for part in command], port, folder / "log", START_S) as url:
            yield url

    return serving


@pytest.fixture(scope="session")
def echo_url(openenv_server) -> Iterator[str]:
    with openenv_server("echo", 100) as url:
        yield url


@pytest.fixture(scope="session")
def sums_url(openenv_server) -> Iterator[str]:
    with openenv_server("sums", 100) as url:
        yield url
