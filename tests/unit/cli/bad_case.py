"""One case of bad input: what lies in the working folder, what is called there, and what the answer says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from agentrl.cli.main import app

RECIPE = """
name = "t"
steps = 1
[environment]
name = "sql"
[policies.main]
model = "model"
[rollout.limits]
max_context_tokens = 512
"""
WARMSTART = """
output = "made"
[environment]
name = "sql"
[limits]
max_context_tokens = 512
[[lessons]]
expert = "expert"
"""
# A process that is asked for a GPU sees none, wherever the tests run.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
HEAVY = ("torch", "transformers")

Make = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """`arguments` are called in a folder with recipe.toml, warmstart.toml and a sound model, as `make` leaves it.

    `says` are parts of the one line. `is_light` is False where torch is needed before the fault can be known.
    """

    id: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    make: Make = lambda: None
    is_light: bool = True


def train(name: str, *arguments: str, says: str | tuple[str, ...], make: Make = lambda: None) -> Case:
    """`agentrl train recipe.toml` with overrides."""
    return case(f"train-{name}", "train", "recipe.toml", *arguments, says=says, make=make)


def warmstart(name: str, *arguments: str, says: str | tuple[str, ...], make: Make = lambda: None) -> Case:
    """`agentrl warmstart warmstart.toml` with overrides."""
    return case(f"warmstart-{name}", "warmstart", "warmstart.toml", *arguments, says=says, make=make)


def case(name: str, *arguments: str, says: str | tuple[str, ...], make: Make = lambda: None) -> Case:
    return Case(name, arguments, (says,) if isinstance(says, str) else says, make)


def edit_json(file: str, **changes: object) -> Make:
    """Replaces entries of a JSON file; those that become None go."""

    def make() -> None:
        values = {**json.loads(Path(file).read_text()), **changes}
        Path(file).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return make


def write(file: str, text: str | bytes) -> Make:
    def make() -> None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(text.encode() if isinstance(text, str) else text)

    return make


def remove(file: str) -> Make:
    return lambda: Path(file).unlink()


def both(*makes: Make) -> Make:
    def make() -> None:
        for one in makes:
            one()

    return make


@dataclass(frozen=True)
class Answer:
    """How a call ended, what it printed, and what it left behind: new or changed files and folders."""

    exit_code: int
    output: str
    left: tuple[str, ...]


def answer_to(case: Case, model: Path, folder: Path) -> Answer:
    """Call a case in a folder of its own."""
    shutil.copytree(model, folder / "model")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "warmstart.toml").write_text(WARMSTART)
    with chdir(folder):
        case.make()
        before = dict(_files(folder))
        result = CliRunner().invoke(app, case.arguments, env=ENVIRONMENT)
        left = tuple(sorted(str(path) for path in (set(_files(folder)) ^ set(before.items()))))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return Answer(result.exit_code, f"Traceback: {result.exception!r}", left)
    return Answer(result.exit_code, result.output, left)


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Everything in a folder but empty folders of runs."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(folder)), path.read_bytes()
        elif path.name != "runs":
            yield f"{path.relative_to(folder)}/", b""
