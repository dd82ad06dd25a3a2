"""Every file of a run, damaged in every way: a command names it with what to do, or it is stated to be harmless."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.orchestration.checkpoint_repair import CheckpointRepair
from agentrl.orchestration.launch import _begin
from agentrl.orchestration.recorder import SilentObserver
from agentrl.orchestration.run_check import find_damage
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.testing.tiny import make_tiny_model
from agentrl.types.errors import AgentRLError, StorageError
from tests.integration import runs

pytestmark = pytest.mark.long
README = Path(__file__).parents[2] / "agentrl" / "README.md"
REMEDY = re.compile(r"restore|remove|--salvage|made again|taken from|makes it again|put it back|make it again")

NAMED = (
    "config.json",
    "state.json",
    "mark",
    "metrics.jsonl",
    "ledger.jsonl",
    "episodes/*.jsonl",
    "episodes/consumed-*.parquet",
    "journal/*.journal",
    "progress/*/*.json",
    "checkpoints/*/[0-9]*/*",
    "weights/*/*.*/*",
)
"""Files whose damage `agentrl runs check` names, and a resume too, as far as it goes on from them."""

HARMLESS = {
    "journal/claim-*.json": "its number alone counts, which its name has; a missing one is made again",
    "tensorboard/*": "a copy of metrics.jsonl",
    "curve.png": "drawn from metrics.jsonl at every evaluation",
    "logs/*": "output of processes, for people to read",
    "traces/*": "spans, for people to look at",
    "trace.json.gz": "made of traces by `agentrl runs trace`",
}
"""Files that no command goes on from, by their kind, and why."""

NOT_FOR_RESUMES = ("weights/*", "episodes/*", "progress/*/*.json")
"""A resume stages its weights anew and shows no episode; older checkpoints matter once the newest is damaged."""


def flip(file: Path, place: float = 0.33) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 0x04
    file.write_bytes(data)


def flip_first(file: Path) -> None:
    flip(file, 0.0)


def flip_late(file: Path) -> None:
    flip(file, 0.95)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size * 2 // 3)


def empty(file: Path) -> None:
    os.truncate(file, 0)


DAMAGES: tuple[Callable[[Path], None], ...] = (flip_first, flip, flip_late, truncate, empty, Path.unlink)


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that is finished, and one that was stopped; read only."""
    folder = tmp_path_factory.mktemp("runs-to-damage")
    model = make_tiny_model(folder / "model")
    short = ("rollout.limits.max_reply_tokens=30", "checkpoint.interval_steps=1")
    for name in ("finished", "stopped"):
        (folder / name).mkdir()
    finished = runs.start(folder / "finished", model, "steps=3", "evaluation.final_tasks=2", *short)
    stopped = runs.start(folder / "stopped", model, runs.ENDLESS, *short)
    stopped_run = folder / "stopped" / "runs" / "test-seed0"
    runs.wait_for_step(stopped_run, 3, stopped)
    stopped.send_signal(signal.SIGTERM)
    assert (stopped.wait(300), finished.wait(300)) == (runs.STOPPED, 0)
    return {"finished": folder / "finished" / "runs" / "test-seed0", "stopped": stopped_run}


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def is_of(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def is_gone_on_from(run: Path, file: str) -> bool:
    """Whether a resume goes on from a file: of checkpoints the newest alone."""
    if not file.startswith("checkpoints/"):
        return not is_of(file, NOT_FOR_RESUMES)
    return is_of(file, [f"checkpoints/main/{max(path.name for path in run.glob('checkpoints/main/[0-9]*'))}/*"])


def cases(run: Path, damage: Callable[[Path], None], folder: Path) -> Iterator[tuple[str, Path]]:
    """Each file of a run by its path there, and a copy of the run in which it is damaged."""
    for number, file in enumerate(files_of(run)):
        if damage is Path.unlink or (run / file).stat().st_size:
            copy = shutil.copytree(run, folder / str(number))
            damage(copy / file)
            yield file, copy
            shutil.rmtree(copy)


def is_named(file: Path, lines: list[str]) -> bool:
    return any(str(file) in line and REMEDY.search(line) and "\n" not in line for line in lines)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", ["finished", "stopped"])
def test_every_damaged_file_is_named_with_the_remedy_or_stated_to_be_harmless(
    kind: str, damage: Callable[[Path], None], originals: dict[str, Path], tmp_path: Path
) -> None:
    assert find_damage(RunDirectory(originals[kind])) == []
    silent = []
    for file, run in cases(originals[kind], damage, tmp_path):
        lines = find_damage(RunDirectory(run))
        is_alone = all(str(run / file) in line for line in lines)
        is_right = is_alone if is_of(file, HARMLESS) else is_named(run / file, lines)
        if not is_right:
            silent.append((file, lines))
    assert silent == [], f"{damage.__name__} of these is not named with file and remedy"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_a_resume_names_whatever_is_damaged_of_what_it_goes_on_from(
    damage: Callable[[Path], None],
    originals: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def not_begun(*_: object) -> None:
        raise StorageError("a trainer would make it again")

    monkeypatch.setattr(CheckpointRepair, "_remake", not_begun)
    silent = []
    for file, run in cases(originals["stopped"], damage, tmp_path):
        caplog.clear()
        error = await begun(run)
        said = [record.getMessage() for record in caplog.records] + error
        is_right = is_named(run / file, said) if is_gone_on_from(run, file) else error == []
        if not (is_right or is_of(file, HARMLESS)):
            silent.append((file, said))
    assert silent == [], f"a resume goes on after {damage.__name__} of these without a word, or ends for no reason"


async def begun(path: Path) -> list[str]:
    """Do what a resume does before engines and trainer start; returns its error."""
    try:
        run = RunDirectory.open(path)
        config, _ = run.config(), run.state()
        start, journal = _begin(config, run, is_salvaged=False)
        try:
            await CheckpointRepair(config, run, journal, SilentObserver()).run_all(start)
        finally:
            await journal.close()
    except AgentRLError as error:
        return [str(error)]
    return []


def as_an_older_program_wrote_it(run: Path) -> None:
    """Take all checksums, digests and marks out of a run."""
    for path in [*run.rglob("*.jsonl"), *run.glob("state.json"), *run.glob("checkpoints/*/*/progress.json")]:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        plain = [{k: v for k, v in row.items() if k not in ("checksum", "files", "digests")} for row in found]
        path.write_text("".join(json.dumps(row) + "\n" for row in plain))
    for path in [*run.rglob("digests.json"), *run.glob("progress/*/*.json")]:
        path.unlink()
    for path in (run / "episodes").glob("*.parquet"):
        name, step, _, number = path.stem.split("-")
        pq.write_table(pq.read_table(path), path.with_name(f"{name}-{step}-{number}.parquet"))
        path.unlink()


async def test_runs_without_checksums_are_still_read(
    originals: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished, stopped = (shutil.copytree(originals[name], tmp_path / name) for name in ("finished", "stopped"))
    for run in (finished, stopped):
        as_an_older_program_wrote_it(run)
        assert find_damage(RunDirectory(run)) == []
    assert await begun(stopped) == []
    assert caplog.records == []
    for words in (("runs", "ledger", str(finished)), ("show", str(finished)), ("runs", "list", str(tmp_path))):
        assert CliRunner().invoke(app, words).exit_code == 0


COMMANDS = {
    "metrics.jsonl": ("runs", "list", "{folder}"),
    "state.json": ("runs", "list", "{folder}"),
    "ledger.jsonl": ("runs", "ledger", "{run}"),
    "episodes/train.jsonl": ("show", "{run}"),
}
"""Which command shows a file."""


@pytest.mark.parametrize("damage", [flip, truncate, empty], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", COMMANDS)
def test_a_command_shows_nothing_of_a_damaged_file_without_naming_it(
    file: str, damage: Callable[[Path], None], originals: dict[str, Path], tmp_path: Path
) -> None:
    run = shutil.copytree(originals["finished"], tmp_path / "runs" / "run")
    words = [word.format(folder=run.parent, run=run) for word in COMMANDS[file]]
    assert CliRunner().invoke(app, words).exit_code == 0
    damage(run / file)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert is_named(run / file, result.output.splitlines()), result.output


def test_every_kind_of_file_is_stated_as_the_documentation_has_it(originals: dict[str, Path]) -> None:
    unknown = {
        file
        for run in originals.values()
        for file in files_of(run)
        if not is_of(file, NAMED) and not is_of(file, HARMLESS)
    }
    assert unknown == set(), "say in NAMED or HARMLESS, and in the README, what becomes of a run that lost these"
    stated = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|$", README.read_text(), re.MULTILINE))
    assert {pattern: stated.get(pattern) for pattern in HARMLESS} == {
        pattern: f"harmless: {reason}" for pattern, reason in HARMLESS.items()
    }
    assert [pattern for pattern in NAMED if pattern not in stated] == []
