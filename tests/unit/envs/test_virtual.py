"""Virtual environments of environments, as far as they show without an installation."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import agentrl
from agentrl.envs import virtual
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.envs.virtual import Requirements, make_python, requirements_of
from agentrl.types.errors import ConfigError
from tests.tiny_wheel import make_wheel

SQL = "agentrl_environments.sql:definition"


def package(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "own"\nversion = "1"\n')
    (folder / "own.py").write_text("x = 1\n")
    return folder


def test_a_shipped_environment_requires_what_the_base_of_agentrl_does_and_nothing_of_its_extras() -> None:
    target, requirements = requirements_of("sql", ())
    declared = {line for line in requires("agentrl") or () if "extra" not in line}
    assert target == SQL
    assert {line.replace(" ", "") for line in requirements.lines} == {line.replace(" ", "") for line in declared}
    root = Path(agentrl.__file__).parent
    assert requirements.links == {
        "agentrl": root,
        "agentrl_environments": (root.parent / "environments").resolve(),
    }


def test_an_environment_that_is_known_nowhere_is_refused_unless_its_package_is_required() -> None:
    with pytest.raises(ConfigError, match=r"no plugin 'sqll' in agentrl\.environments; did you mean 'sql'"):
        requirements_of("sqll", ())
    target, requirements = requirements_of("sqll", ("sqll-package==1",))
    assert target == "sqll"
    assert "sqll-package==1" in requirements.lines


def test_a_changed_file_of_a_local_package_makes_another_virtual_environment_and_what_builds_leave_does_not(
    tmp_path: Path,
) -> None:
    folder = package(tmp_path / "build")  # the name of the folder itself plays no part
    requirements = Requirements((str(folder), "numpy"), {})
    before = requirements.digest()
    assert Requirements(("numpy", str(folder)), {}).digest() == before
    (folder / "own.egg-info").mkdir()
    (folder / "own.egg-info" / "PKG-INFO").write_text("")
    assert requirements.digest() == before
    (folder / "own.py").write_text("x = 2\n")
    assert requirements.digest() != before


def test_versions_links_and_exactness_make_other_virtual_environments(tmp_path: Path) -> None:
    digests = {
        requirements.digest()
        for requirements in (
            Requirements(("a==1",), {}),
            Requirements(("a==2",), {}),
            Requirements(("a==1",), {"own": tmp_path}),
            Requirements(("a==1",), {}, is_locked=True),
        )
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"requirements": ["numpy"]}, 'set placement = "venv"'),
        ({"placement": "venv", "interpreter": sys.executable}, "leave one out"),
        ({"placement": "venv", "requirements": ["--index-url=x"]}, "is no requirement of pip"),
        ({"placement": "venv", "requirements": ["./not-there"]}, "give the path of a package's folder"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_installed(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        EnvironmentConfig(name="sql", **values)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was said while virtual environments were made; these have nothing of agentrl's base."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return []


def imported_by(python: Path) -> str:
    """The file of the module that only the virtual environment has."""
    return said_by(python, "import only_there; print(only_there.__file__)")


def version_in(python: Path) -> str:
    return said_by(python, "from importlib.metadata import version; print(version('only_there'))")


def said_by(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


async def python_of(lines: tuple[str, ...], folder: Path, said: list[str], name: str = "own") -> Path:
    return await make_python(name, Requirements(lines, {}), folder / "lock.txt", folder / "install.log", said.append)


@pytest.mark.long
async def test_what_cannot_be_installed_is_named_with_the_log(bare: list[str], tmp_path: Path) -> None:
    (tmp_path / "no_package").mkdir()
    with pytest.raises(ConfigError) as caught:
        await python_of((str(tmp_path / "no_package"),), tmp_path, bare)
    message = str(caught.value)
    assert "environment 'own': what it requires cannot be installed; correct environment.requirements" in message
    assert f"end of {tmp_path / 'install.log'}" in message
    assert "no_package' is not installable" in message


@pytest.mark.long
async def test_two_that_want_the_same_make_it_once_and_a_half_made_one_is_made_anew(
    bare: list[str], tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path, "only_there", "1.0", "x = 1")
    first, second = await asyncio.gather(*(python_of((str(wheel),), tmp_path, bare) for _ in range(2)))
    assert first == second
    assert len(bare) == 1
    assert "only_there" in await asyncio.to_thread(imported_by, first)
    (first.parent.parent / "requirements.lock").unlink()
    assert await python_of((str(wheel),), tmp_path, bare) == first
    assert len(bare) == 2


@pytest.mark.long
async def test_a_run_that_is_resumed_gets_the_versions_that_it_had(bare: list[str], tmp_path: Path) -> None:
    old, new = (make_wheel(tmp_path, "only_there", version, "") for version in ("1.0", "2.0"))
    first = await python_of((str(old),), tmp_path, bare)
    # Meanwhile the same declaration has come to mean another version.
    resumed = await python_of((str(new),), tmp_path, bare)
    versions = [await asyncio.to_thread(version_in, python) for python in (first, resumed)]
    assert versions == ["1.0", "1.0"]


async def test_one_that_is_not_made_in_time_is_named_and_left_to_be_made_anew(
    bare: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "INSTALL_S", 0.2)
    with pytest.raises(ConfigError, match=r"its virtual environment was not made within 0\.2 s"):
        await python_of(("numpy",), tmp_path, bare)
    assert list(tmp_path.rglob("requirements.lock")) == []


async def test_an_environment_whose_name_needs_an_import_is_refused_as_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no plugin 'sqll'"):
        await build_host(EnvironmentConfig(name="sqll", placement="venv"), 5.0, tmp_path)
