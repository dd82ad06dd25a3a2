"""One case of bad input: what lies in the working folder, what is called there, and what the answer says."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import typer

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
# Made once: typer takes longer for that than most answers take.
COMMAND = typer.main.get_command(app)
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

    exit_code: int | str | None
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
        exit_code, output = _call(case.arguments)
        left = tuple(sorted(str(path) for path in (set(_files(folder)) ^ set(before.items()))))
    return Answer(exit_code, output, left)


def _call(arguments: tuple[str, ...]) -> tuple[int | str | None, str]:
    """The exit code of a command, and all that it wrote."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said), patch.dict(os.environ, ENVIRONMENT):
        try:
            COMMAND.main(list(arguments), prog_name="agentrl")
        except SystemExit as ended:
            return ended.code, said.getvalue()
        except Exception:  # noqa: BLE001 - whatever a command lets through is what a person would see
            return 1, said.getvalue() + traceback.format_exc()
    return 0, said.getvalue()


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Everything in a folder but empty folders of runs."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(folder)), path.read_bytes()
        elif path.name != "runs":
            yield f"{path.relative_to(folder)}/", b""
