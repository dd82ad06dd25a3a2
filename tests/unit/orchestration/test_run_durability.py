"""What a checkpoint knows of journal and ledger is missed at a resume, and nothing else is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.group import Group
from agentrl.journal import entries as e
from agentrl.journal.index import open_journal
from agentrl.journal.reading import read_journal
from agentrl.orchestration import launch
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.controller import Controller
from agentrl.orchestration.run_directory import Progress, RunDirectory
from agentrl.orchestration.run_journal import RunJournal
from agentrl.types.errors import StorageError
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion
from tests.unit.journal.journals import name_of, taken, whole_life

WRITERS = ("worker-0", "buffer")
LINES = [json.dumps({"episode_id": name_of(number)}) + "\n" for number in (0, 1)]


def begin(run: RunDirectory, is_salvaged: bool = False) -> RunJournal:
    return launch._begin(run.config(), run, is_salvaged)[1]


async def checkpoint(run: RunDirectory, journal: RunJournal, step: int, meanwhile: Group | None = None) -> None:
    """What a controller saves after a step that made the first group final; a group may be dropped `meanwhile`."""

    async def save(folder: Path) -> None:
        folder.mkdir(parents=True)

    def finish_ledger(steps: dict[str, int]) -> int:
        run.ledger.write_text("".join(LINES))
        if meanwhile is not None:
            asyncio.get_running_loop().call_soon(journal.buffer.dropped, meanwhile, [name_of(2)], "stale")
        return run.ledger.stat().st_size

    parts = SimpleNamespace(
        config=run.config(),
        run=run,
        journal=journal,
        start=SimpleNamespace(versions={"main": PolicyVersion(0, 0)}, number=step - 1, checkpoints={}),
        trainer=lambda policy: SimpleNamespace(save=save),
        recorder=SimpleNamespace(finish_ledger=finish_ledger),
        snapshots=(),
        buffer=SimpleNamespace(frontiers=lambda steps: {"fake": FrontierState(1)}, journal=journal.buffer),
    )
    controller = Controller(parts)  # type: ignore[arg-type]
    [loop] = controller._loops.values()
    loop.version = PolicyVersion(0, step)
    await controller._checkpoint(loop)


@pytest.fixture
async def run(tmp_path: Path) -> RunDirectory:
    """A run that died behind its checkpoint: it holds the first group, the second is in play."""
    table = {
        "name": "demo",
        "steps": 6,
        "runs_folder": tmp_path,
        "policies": {"main": {"model": tmp_path / "model"}},
        "environments": {"fake": {"name": "sql"}},
        "buffer": {"group_size": 2},
    }
    run = RunDirectory.create(RunConfig.model_validate(table))
    journal = begin(run)
    for number in (0, 1, 2):
        for entry in whole_life(number):
            await journal.rollouts.writer.append(*e.pack(name_of(number), entry))  # type: ignore[attr-defined]
    await journal.buffer.writer.append(*e.pack(None, taken(0, 0, 1)))  # type: ignore[attr-defined]
    await checkpoint(run, journal, 1)
    await journal.close()
    return run


async def test_what_is_dropped_while_a_checkpoint_is_written_is_not_final_with_it(run: RunDirectory) -> None:
    journal = begin(run)
    await checkpoint(run, journal, 2, meanwhile=Group(1, Task("sql", Split.TRAIN, 1, {}), 1, {"main": 0}))
    await journal.close()
    state = open_journal(run.journal)
    assert (state.checkpointed, len(state.dropped)) == ({"main": 2}, 1)


async def test_what_a_checkpoint_knows_to_be_dropped_is_durable_before_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, on_record = begin(run), []
    write_progress = run.write_progress

    def look(*arguments: Any) -> None:
        on_record.extend(entry.group for entry in read_journal(run.journal).dropped)
        write_progress(*arguments)

    monkeypatch.setattr(run, "write_progress", look)
    journal.buffer.dropped(Group(1, Task("sql", Split.TRAIN, 1, {}), 1, {"main": 0}), [name_of(2)], "stale")
    await checkpoint(run, journal, 2)
    await journal.close()
    assert on_record == [1]


def groups(journal: RunJournal) -> list[int]:
    return [group.number for group in journal.recovered.groups]


async def test_a_checkpoint_names_the_newest_segment_of_each_writer(run: RunDirectory) -> None:
    progress = run.latest_checkpoint()
    assert {end.writer: end.number for end in progress.journal} == dict.fromkeys(WRITERS, 1)
    assert all(0 < end.end_bytes < (run.journal / end.name).stat().st_size for end in progress.journal)
    assert groups(begin(run)) == [1]


async def test_a_writer_that_has_not_written_since_the_start_is_named_as_before(run: RunDirectory) -> None:
    journal = begin(run)
    await journal.buffer.writer.append(*e.pack(None, e.Checkpointed({"main": 1})))  # type: ignore[attr-defined]
    assert {end.writer: end.number for end in journal.ends()} == {"worker-0": 1, "buffer": 2}
    await journal.close()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("is_missing", [True, False])
async def test_a_journal_that_lost_its_end_is_refused_and_can_be_salvaged(
    writer: str, is_missing: bool, run: RunDirectory
) -> None:
    progress = run.latest_checkpoint()
    end = next(end for end in progress.journal if end.writer == writer)
    path = run.journal / end.name
    kept = path.read_bytes()[: end.end_bytes - 1]
    path.unlink()
    if not is_missing:
        path.write_bytes(kept)
    what = "is missing although the newest checkpoint names it" if is_missing else "is damaged at bytes"
    with pytest.raises(StorageError, match=rf"journal segment {path} {what}.*--salvage"):
        begin(run)
    has_second_group = writer == "buffer" or not is_missing
    # The first group is final by the checkpoint, even where what took it is lost.
    assert groups(begin(run, is_salvaged=True)) == [1] * has_second_group
    assert groups(begin(run)) == [1] * has_second_group, "once salvaged, nothing is missed any more"


async def test_a_checkpoint_of_an_older_program_names_no_segment(run: RunDirectory) -> None:
    folder, progress = next(run.checkpoints())
    table = json.loads((folder / "progress.json").read_text())
    for name in ("journal", "digests", "checksum"):
        del table[name]
    (folder / "progress.json").write_text(json.dumps(table))
    assert run.latest_checkpoint().journal == ()
    (run.journal / progress.journal[0].name).unlink()
    assert groups(begin(run)) == []


@pytest.mark.parametrize("missing_bytes", [1, len(LINES[1]) + 1, sum(map(len, LINES))])
async def test_a_ledger_that_is_short_is_refused_and_can_be_salvaged(missing_bytes: int, run: RunDirectory) -> None:
    whole = run.ledger.read_text()
    run.ledger.write_text(whole[: len(whole) - missing_bytes])
    if missing_bytes == len(whole):
        run.ledger.unlink()
    message = rf"{run.ledger} lacks {missing_bytes} of the {len(whole)} bytes .*restore the file.*--salvage"
    with pytest.raises(StorageError, match=message):
        begin(run)
    kept = {1: LINES[0]}.get(missing_bytes, "")
    assert groups(begin(run, is_salvaged=True)) == [1], "what was trained is not trained again"
    assert (run.ledger.read_text() if run.ledger.is_file() else "") == kept
    # A checkpoint that is not complete leaves lines behind what is left; they are taken back as ever.
    run.ledger.write_text(kept + whole)
    assert groups(begin(run)) == [1]
    assert run.ledger.read_text() == kept


async def test_a_run_without_a_checkpoint_needs_no_ledger(run: RunDirectory) -> None:
    run.ledger.unlink()
    assert run.cut_ledger(0) == set()
    run.ledger.write_text("".join(LINES))
    assert run.cut_ledger(len(LINES[0])) == {name_of(0)}


def test_the_names_of_a_new_run_and_of_its_parents_outlive_a_loss_of_power(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("agentrl.journal.disk.sync_path", synced.append)
    config = run.config().model_copy(update={"runs_folder": tmp_path / "new" / "runs"})
    RunDirectory.create(config)
    assert {tmp_path, tmp_path / "new", tmp_path / "new" / "runs"} <= set(synced)


async def test_who_has_trained_a_group_that_waits_for_another_is_salvaged_too(tmp_path: Path) -> None:
    """Group 0 is trained by one policy and waits for the other; of group 1 one policy was left out."""
    both = ("white", "black")
    table = {
        "name": "demo",
        "steps": 6,
        "runs_folder": tmp_path,
        "policies": {name: {"model": tmp_path / name} for name in both},
        "environments": {"fake": {"name": "sql", "agents": {name: name for name in both}}},
        "buffer": {"group_size": 2},
    }
    run = RunDirectory.create(RunConfig.model_validate(table))
    journal = begin(run)
    for number in range(4):
        lease, *rest = whole_life(number)
        versions = dict.fromkeys(both, PolicyVersion(0, 0))
        ticket = replace(lease.ticket, started_at=versions)
        for entry in (replace(lease, ticket=ticket), *rest):
            await journal.rollouts.writer.append(*e.pack(name_of(number), entry))  # type: ignore[attr-defined]
    left_out = e.LeftOut("black", 1, (name_of(2), name_of(3)), "no_spread", both)
    for entry in (taken(0, 0, 1, policy="white", policies=both), left_out):
        await journal.buffer.writer.append(*e.pack(None, entry))  # type: ignore[attr-defined]
    await journal.close()
    folder = run.checkpoint("white", 1)
    folder.mkdir(parents=True)
    versions = {"white": PolicyVersion(0, 1), "black": PolicyVersion(0, 0)}
    run.write_progress(folder, Progress(versions, journal=journal.ends(), number=1))

    def found(is_salvaged: bool) -> dict[int, tuple[set[str], dict[str, int]]]:
        journal = begin(run, is_salvaged)
        assert journal.recovered.redo == {}
        return {group.number: (group.waits_for, group.trained_by) for group in journal.recovered.groups}

    expected = {0: ({"black"}, {"white": 1}), 1: ({"white"}, {})}
    assert found(is_salvaged=False) == expected
    assert found(is_salvaged=True) == expected
    assert found(is_salvaged=False) == expected, "once salvaged, whoever has trained does not train again"
