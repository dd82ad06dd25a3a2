"""Power is lost while consumed episodes move to the archive: each is there afterwards, once, and no other is gone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from agentrl import codec
from agentrl.journal import entries as e
from agentrl.journal.archive_names import archive_files
from agentrl.journal.index import open_journal
from agentrl.testing.power_loss import Call, Content, DiskImage, RecordingDisk, write_content
from tests.unit.journal.journals import Journal, archive_and_compact, dropped, name_of, read_archived, taken, whole_life

NUM_FINAL = 4
LOSSES_PER_MOMENT = 4
PROTECTIONS = ("syncs_files", "syncs_names", "syncs_folders")


def make_journal(root: Path) -> Content:
    """Episode n lies in the worker's segment n; all but the last two are final."""
    journal = Journal(root / "journal")
    for number in range(NUM_FINAL + 2):
        journal.rotate("worker")
        journal.play(number, whole_life(number))
    journal.note(taken(0, 0, 1), dropped(1, 2), taken(1, 3), e.Checkpointed({"main": 2}), taken(2, 4))
    return content_of(root)


def content_of(root: Path) -> Content:
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def losses(before: Content, disk: RecordingDisk) -> Iterator[Content]:
    """What a loss of power at each moment leaves, by chance."""
    random, image = Random(0), DiskImage(before)
    for moment in range(len(disk.operations) + 1):
        for _ in range(LOSSES_PER_MOMENT):
            yield image.after_loss(random)
        if moment < len(disk.operations):
            image.apply(disk.operations[moment])


def fault_of(root: Path, content: Content, expected: dict[str, bytes]) -> str | None:
    """What is wrong once the next checkpoint has archived and compacted what was left."""
    shutil.rmtree(root, ignore_errors=True)
    write_content(root, content, {})
    try:
        archive_and_compact(root / "journal", root / "episodes")
        rows = [(file, name) for file in archive_files(root / "episodes") for name in names_in(file)]
        found = {name: codec.encode(read_archived(file, name)) for file, name in rows}
        in_play = set(open_journal(root / "journal").lives)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run cannot go on from here
        return repr(error)
    if (twice := Counter(name for _, name in rows)) and max(twice.values()) > 1:
        return f"twice: {twice}"
    if found != expected:
        return f"archived {sorted(found)}"
    if not {name_of(NUM_FINAL), name_of(NUM_FINAL + 1)} <= in_play:
        return f"in play {sorted(in_play)}"
    return None


def names_in(file: Path) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_table(file, columns=["episode_id"]).column("episode_id").to_pylist()


def faults(tmp_path: Path, **protections: bool) -> tuple[list[str], int]:
    """Faults of all states, and how many states there were."""
    root = tmp_path / "run"
    root.mkdir()
    before = make_journal(root)
    disk = RecordingDisk(root, **protections)
    archive_and_compact(root / "journal", root / "episodes", disk)
    assert {Call.RENAME, Call.REMOVE} <= {operation.call for operation in disk.operations}
    files = archive_files(root / "episodes")
    expected = {name: codec.encode(read_archived(file, name)) for file in files for name in names_in(file)}
    assert sorted(expected) == sorted(map(name_of, range(NUM_FINAL)))
    found, count = [], 0
    for content in losses(before, disk):
        fault = fault_of(tmp_path / "state", content, expected)
        found += [fault] if fault else []
        count += 1
    return found, count


def test_no_loss_of_power_takes_an_episode_or_archives_one_twice(tmp_path: Path) -> None:
    found, count = faults(tmp_path)
    assert found == []
    assert count > 50


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_without_a_sync_the_same_move_loses_episodes(protection: str, tmp_path: Path) -> None:
    found, _ = faults(tmp_path, **{protection: False})
    assert found
