"""An environment's own virtual environment: made once of what it requires, and kept under a hash of that.

Packages of two environments may exclude each other, or exclude those of the run. Such an environment's processes run by
a Python that has what it requires and what the base of agentrl requires, installed by pip; agentrl itself and the
environment's code are linked, so that they are the run's own. What was installed is the lock: a run keeps it beside its
logs, and a run that is resumed on another machine gets the same versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

import agentrl
from agentrl import registry
from agentrl.config.cache import cache_folder
from agentrl.envs.config import is_path
from agentrl.process.starting import tail
from agentrl.types.errors import ConfigError

INSTALL_S = 1800.0
"""Deadline of an installation, and of the wait for another process that makes the same."""
_POLL_S = 0.1
_LOCK = "requirements.lock"
_BUILT = frozenset({".git", ".venv", "__pycache__", "build", "dist", "node_modules"})


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a virtual environment is made of.

    `lines` are requirements, or paths of packages, as pip takes them; `links` are the run's own packages and
    modules, by the names that they are imported by. With `is_locked` the lines name every package, and nothing else is
    installed.

    Example: ``Requirements(("msgspec>=0.20", "numpy==2.1.0"), {"agentrl": Path("/src/agentrl")})``.
    """

    lines: tuple[str, ...]
    links: Mapping[str, Path]
    is_locked: bool = False

    def digest(self) -> str:
        """[32] hexadecimal digits: the same for the same Python, lines, links and contents of local packages."""
        parts = [sys.version, sysconfig.get_platform(), str(self.is_locked), *sorted(self.lines)]
        parts += [f"{name} {path}" for name, path in sorted(self.links.items())]
        digest = hashlib.sha256("\n".join(parts).encode())
        for line in sorted(self.lines):
            for file in sorted(_files(Path(line))) if is_path(line) else ():
                digest.update(file.read_bytes())
        return digest.hexdigest()[:32]


def requirements_of(name: str, more: Sequence[str]) -> tuple[str, Requirements]:
    """What an environment requires, and the name under which its own Python finds it.

    That is what agentrl's base and the distribution that has registered the environment declare, and `more`. An
    environment that the run's Python does not know must come with `more`.

    Raises:
        ConfigError: the name is registered more than once, or nothing here or in `more` can bring it.
    """
    target, distributions = name, ["agentrl"]
    if ":" not in name:
        known = [plugin for plugin in registry.list_plugins(registry.ENVIRONMENTS) if plugin.name == name]
        if known or not more:
            plugin = registry.find_plugin(registry.ENVIRONMENTS, name)
            target, distributions = plugin.target, ["agentrl", plugin.distribution]
    lines = {line for each in distributions for line in _declared(each)}
    local = {str(Path(line).expanduser().absolute()) if is_path(line) else line for line in more}
    links = {"agentrl": Path(agentrl.__file__).parent} | _top_level(target)
    return target, Requirements((*sorted(lines), *sorted(local)), links)


async def make_python(
    name: str, requirements: Requirements, lock: Path, log: Path, on_phase: Callable[[str], object]
) -> Path:
    """The Python of an environment's virtual environment, which is made unless it is there.

    Where `lock` is there, the virtual environment has these versions; else they are written to it.

    Waits for: pip, and another process that makes the same. Unblocked by: their ends, or half an hour.

    Raises:
        ConfigError: something cannot be installed; names it and the log.
    """
    folder = await _made(name, requirements, log, on_phase)
    found = (folder / _LOCK).read_text()
    if not lock.is_file():
        lock.write_text(found)
    elif (wanted := lock.read_text()) != found:
        locked = Requirements(tuple(wanted.splitlines()), requirements.links, is_locked=True)
        folder = await _made(name, locked, log, on_phase)
    return folder / "bin" / "python"


async def _made(name: str, requirements: Requirements, log: Path, on_phase: Callable[[str], object]) -> Path:
    cache = cache_folder()
    if cache is None:
        raise ConfigError(f"environment '{name}': there is no home for its virtual environment; set XDG_CACHE_HOME")
    folder = cache / "venvs" / requirements.digest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        async with asyncio.timeout(INSTALL_S), _alone(folder.with_suffix(".lock")):
            if (folder / _LOCK).is_file():
                return folder
            on_phase(f"making a virtual environment for environment '{name}' (once): {folder}")
            await _make(name, folder, requirements, log)
    except TimeoutError:
        raise ConfigError(
            f"environment '{name}': its virtual environment was not made within {INSTALL_S:g} s; see {log}"
        ) from None
    return folder


async def _make(name: str, folder: Path, requirements: Requirements, log: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    await _run(name, log, [sys.executable, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    exactly = ["--no-deps"] if requirements.is_locked else []
    await _run(name, log, [*pip, "install", "--quiet", *exactly, *requirements.lines])
    site = next((folder / "lib").glob("python*/site-packages"))
    for module, path in requirements.links.items():
        # One that pip has installed stays as it is: the requirements name it.
        with contextlib.suppress(FileExistsError):
            (site / (module if path.is_dir() else path.name)).symlink_to(path)
    frozen = folder / "frozen.txt"
    frozen.write_text("")
    await _run(name, frozen, [*pip, "freeze"])
    # Last: a virtual environment without it was not finished, and is made anew.
    frozen.replace(folder / _LOCK)


def _kill(process: asyncio.subprocess.Process) -> None:
    """End a process with its group, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):  # that it has just ended is not known yet
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


async def _run(name: str, log: Path, command: Sequence[str]) -> None:
    """Run a program to its end; whoever stops waiting ends it. Raises ConfigError if it fails."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = await process.wait()
        finally:
            _kill(process)
    if status != 0:
        raise ConfigError(
            f"environment '{name}': what it requires cannot be installed; correct environment.requirements, or what "
            f"its package declares; `{' '.join(command)}` ended with status {status}, end of {log}:\n{tail(log)}"
        )


@asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """No other process is in the block at the same time. Waits for: it; the caller sets the deadline."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
            else:
                break
        yield


def _declared(name: str) -> Iterable[str]:
    """What a distribution requires on this machine, its extras and agentrl left out."""
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return
    for line in lines:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name != "agentrl":
            requirement.marker = None
            yield str(requirement)


def _top_level(target: str) -> dict[str, Path]:
    """The package or module of the run's Python that has a target, if there is one; imports nothing."""
    module = target.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(module)
    if spec is None or ":" not in target:
        return {}
    folders = list(spec.submodule_search_locations or [])
    place = folders[0] if folders else spec.origin
    return {} if place is None else {module: Path(place).resolve()}


def _files(path: Path) -> Iterable[Path]:
    """Files of a local package, or the wheel itself; what builds leave beside them is left out."""
    if path.is_file():
        return [path]
    files = [file for file in path.rglob("*") if file.is_file()]
    return [file for file in files if not any(map(_is_built, file.relative_to(path).parts))]


def _is_built(part: str) -> bool:
    return part in _BUILT or part.endswith(".egg-info")
