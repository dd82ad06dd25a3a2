"""A run has finished once its archive holds its ledger: held against Parquet and JSON as other tools read them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl import codec
from agentrl.journal import entries as e
from agentrl.journal.claim import Claim
from agentrl.orchestration import launch
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.recorder import SilentObserver
from agentrl.orchestration.run_check import find_damage
from agentrl.orchestration.run_directory import Progress, RunDirectory, RunState, RunStatus
from agentrl.orchestration.run_end import ArchiveCompleted, end_run
from agentrl.orchestration.run_journal import RunJournal
from agentrl.testing.builders import build_ticket
from agentrl.types.errors import Boundary, ConfigError, Failure, StorageError
from agentrl.types.version import PolicyVersion
from tests.unit.buffer import ledger_lines
from tests.unit.journal.journals import dropped, name_of, taken, whole_life

BOTH = ("white", "black")
LAST = {"white": PolicyVersion(0, 1), "black": PolicyVersion(0, 0)}
LOST = Failure(Boundary.ENVIRONMENT, "lost", "its worker is gone")


def line(number: int, outcome: str = "dropped", reason: str = "run_ended", **changes: Any) -> str:
    made = ledger_lines.trained(number // 2, number % 2) if outcome == "trained" else ledger_lines.dropped(number)
    fields = {"episode_id": name_of(number), "group": number // 2, "member": number % 2, "environment": "fake"}
    reason = "" if outcome == "trained" else reason
    return codec.to_json(replace(made, **fields, reason=reason, **changes)).decode()


LINES = (
    line(0, "trained", step=1, trained_by={"white": 1}),
    line(1, "trained", step=1, trained_by={"white": 1}),
    line(2, reason="environment_lost"),
    line(3),
    line(4, reason="stale"),
)


def make_run(folder: Path) -> RunDirectory:
    table = {
        "name": "demo",
        "steps": 1,
        "runs_folder": folder,
        "policies": {name: {"model": folder / name} for name in BOTH},
        "environments": {"fake": {"name": "sql", "agents": {name: name for name in BOTH}}},
        "buffer": {"group_size": 2},
    }
    return RunDirectory.create(RunConfig.model_validate(table))


async def play(journal: RunJournal, number: int, entries: Sequence[e.EpisodeEntry]) -> None:
    for entry in entries:
        await journal.rollouts.writer.append(*e.pack(name_of(number), entry))  # type: ignore[attr-defined]


@pytest.fixture
async def ended(tmp_path: Path) -> AsyncIterator[tuple[RunDirectory, RunJournal]]:
    """A run behind its last step, whose ledger is whole.

    Of its first group only one policy made a step. A member of the second failed, the other was cut off. Of the third
    no checkpoint has made final that it was dropped.
    """
    run = make_run(tmp_path)
    journal = RunJournal.open(Claim.take(run.journal), run, run.config(), Progress(dict(LAST)), set(), False)
    lives = {number: whole_life(number) for number in range(5)}
    lives[2] = [*lives[2][:3], e.Ended(1, None, LOST, 1.0)]
    lives[3] = lives[3][:3]
    for number, life in lives.items():
        await play(journal, number, life)
    buffer = journal.buffer.writer  # type: ignore[attr-defined]
    for entry in (taken(0, 0, 1, policy="white", policies=BOTH), e.Checkpointed({"white": 1}), dropped(2, 4)):
        await buffer.append(*e.pack(None, entry))
    run.ledger.write_text("".join(f"{text}\n" for text in LINES))
    yield run, journal
    await journal.close()


def archived(run: RunDirectory) -> list[tuple[str, str, str | None]]:
    """Name, outcome and reason of every row."""
    files = sorted(run.episodes.glob("consumed-*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted((row["episode_id"], row["outcome"], row["reason"]) for row in rows)


def in_ledger(run: RunDirectory) -> list[tuple[str, str, str | None]]:
    rows = [json.loads(text) for text in run.ledger.read_text().splitlines()]
    return sorted((row["episode_id"], row["outcome"], row["reason"] or None) for row in rows)


def status(run: RunDirectory) -> str:
    return json.loads((run.path / "state.json").read_text())["status"]


async def test_what_no_step_took_is_archived_as_the_ledger_has_it(ended: tuple[RunDirectory, RunJournal]) -> None:
    run, journal = ended
    assert await end_run(run, run.config(), journal, LAST) == 5
    assert archived(run) == in_ledger(run)
    assert status(run) == "finished"


async def test_a_run_has_not_finished_while_its_archiver_is_busy(ended: tuple[RunDirectory, RunJournal]) -> None:
    run, journal = ended
    run.write_state(RunState(RunStatus.UNARCHIVED, dict(LAST)))
    journal.tidy()
    archiver = journal._archiver
    assert archiver is not None
    while archiver.child is None:
        await asyncio.sleep(0.01)
    os.kill(archiver.child.pid, signal.SIGSTOP)
    ending = asyncio.create_task(end_run(run, run.config(), journal, LAST))
    await asyncio.wait([ending], timeout=0.3)
    assert (ending.done(), status(run)) == (False, "unarchived")
    os.kill(archiver.child.pid, signal.SIGCONT)
    await ending
    assert archived(run) == in_ledger(run)
    assert status(run) == "finished"


async def test_an_archive_that_cannot_be_written_leaves_the_run_to_a_resume(
    ended: tuple[RunDirectory, RunJournal],
) -> None:
    run, journal = ended
    run.write_state(RunState(RunStatus.UNARCHIVED, dict(LAST)))
    run.episodes.rmdir()
    run.episodes.write_text("a file where the archive's folder should be")
    with pytest.raises(StorageError, match="cannot be written"):
        await end_run(run, run.config(), journal, LAST)
    state = run.state()
    assert state is not None
    assert (state.status, "cannot be written" in state.message) == ("unarchived", True)
    await journal.close()
    run.episodes.unlink()
    done = await launch.resume_run(run.path, SilentObserver())
    assert done == ArchiveCompleted(run.path, PolicyVersion(0, 0), 5)
    assert archived(run) == in_ledger(run)


@pytest.mark.parametrize("known", [RunStatus.FINISHED, RunStatus.UNARCHIVED])
async def test_a_resume_completes_the_archive_and_the_next_finds_nothing_left(
    known: RunStatus, ended: tuple[RunDirectory, RunJournal]
) -> None:
    """An older program marked a run as finished before its archive was complete."""
    run, journal = ended
    await journal.close()
    run.write_state(RunState(known, dict(LAST)))
    done = await launch.resume_run(run.path, SilentObserver())
    assert done == ArchiveCompleted(run.path, PolicyVersion(0, 0), 5)
    assert archived(run) == in_ledger(run)
    before = archived(run)
    with pytest.raises(ConfigError, match="nothing is left to resume"):
        await launch.resume_run(run.path, SilentObserver())
    assert archived(run) == before


async def test_what_a_completed_archive_loses_later_is_named(ended: tuple[RunDirectory, RunJournal]) -> None:
    run, journal = ended
    await journal.close()
    run.write_state(RunState(RunStatus.UNARCHIVED, dict(LAST)))
    await launch.resume_run(run.path, SilentObserver())
    [archive] = (run.path / "episodes").glob("*.parquet")
    archive.unlink()
    assert [damage for damage in find_damage(run) if f"{archive} is missing" in damage], "no mark of it is left"


async def test_an_episode_that_no_worker_began_is_archived_too(ended: tuple[RunDirectory, RunJournal]) -> None:
    run, journal = ended
    unbegun, begun = build_ticket(name_of(7), 3, 1), build_ticket(name_of(3), 1, 1)
    on_record = await journal.played([unbegun, begun])
    assert {name: len(episode.turns) for name, episode in on_record.items()} == {name_of(3): 1}
    with run.ledger.open("a") as file:
        file.write(line(7) + "\n")
    await end_run(run, run.config(), journal, LAST)
    assert archived(run) == in_ledger(run)
