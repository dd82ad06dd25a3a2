from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.journal import entries as e
from agentrl.journal.archive import archive
from agentrl.journal.archive_file import archive_files
from agentrl.journal.index import JournalIndex, open_journal
from agentrl.journal.pruning import prune
from agentrl.journal.reading import all_segments
from agentrl.journal.writer import JournalWriter
from tests.unit.journal.journals import Journal, dropped, name_of, taken, told, whole_life


def names(folder: Path) -> list[str]:
    return [path.stem.replace("0000000", "") for path in all_segments(folder)]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Episode n lies in the worker's segment n; 0 and 1 are final, 2 is taken, the rest in play; all are archived."""
    journal = Journal(tmp_path / "journal")
    for number in range(4):
        journal.rotate("worker")
        journal.play(number, whole_life(number))
    journal.note(taken(0, 0), dropped(0, 1), e.Checkpointed(1), taken(1, 2))
    archive(journal.folder, tmp_path / "episodes")
    return journal


def test_segments_whose_episodes_are_final_and_archived_are_deleted(journal: Journal, tmp_path: Path) -> None:
    before = told(open_journal(journal.folder))
    assert names(journal.folder) == ["buffer-1", "worker-1", "worker-2", "worker-3", "worker-4"]
    assert prune(journal.folder, tmp_path / "episodes") == 2
    assert names(journal.folder) == ["buffer-1", "worker-3", "worker-4"]
    assert told(open_journal(journal.folder)) == before


def test_what_is_not_archived_stays(journal: Journal, tmp_path: Path) -> None:
    assert prune(journal.folder, tmp_path / "none") == 0
    journal.note(e.Checkpointed(2))
    prune(journal.folder, tmp_path / "episodes")
    assert names(journal.folder) == ["buffer-1", "worker-3", "worker-4"]
    assert archive(journal.folder, tmp_path / "episodes").episodes == 1
    prune(journal.folder, tmp_path / "episodes")
    assert names(journal.folder) == ["buffer-1", "worker-4"]


def test_the_newest_segment_of_a_writer_is_never_touched(journal: Journal, tmp_path: Path) -> None:
    journal.play(4, whole_life(4), "other")
    journal.note(taken(1, 2, 3, 4), e.Checkpointed(2))
    archive(journal.folder, tmp_path / "episodes")
    prune(journal.folder, tmp_path / "episodes")
    assert names(journal.folder) == ["buffer-1", "other-1", "worker-4"]
    journal.play(5, whole_life(5))
    assert list(open_journal(journal.folder).lives) == [name_of(5)]


def test_what_makes_an_episode_final_outlives_the_rest_of_its_entries(journal: Journal, tmp_path: Path) -> None:
    # Episode 5 begins in a segment that can go and ends in one that episode 6 holds.
    journal.rotate("worker")
    journal.play(5, whole_life(5)[:3])
    journal.rotate("worker")
    journal.play(5, whole_life(5)[3:])
    journal.play(6, whole_life(6))
    journal.note(taken(2, 3, 5), e.Checkpointed(3))
    journal.rotate("worker")
    journal.rotate("buffer")
    journal.note(e.Checkpointed(4))
    archive(journal.folder, tmp_path / "episodes")
    prune(journal.folder, tmp_path / "episodes")
    assert names(journal.folder) == ["buffer-1", "buffer-2", "worker-6", "worker-7"]
    assert list(open_journal(journal.folder).lives) == [name_of(6)]
    journal.note(taken(4, 6), e.Checkpointed(5))
    archive(journal.folder, tmp_path / "episodes")
    prune(journal.folder, tmp_path / "episodes")
    assert names(journal.folder) == ["buffer-2", "worker-7"]


def test_entries_of_the_buffer_go_in_the_order_of_the_journal(tmp_path: Path) -> None:
    # Episode 0, which 1 keeps from being deleted, is named in the first segment and made final by the second.
    journal, target = Journal(tmp_path / "journal"), tmp_path / "episodes"
    for number in (0, 1):
        journal.play(number, whole_life(number))
    for entry in (taken(0, 0), e.Checkpointed(1), e.Checkpointed(2), e.Checkpointed(3)):
        journal.rotate("buffer")
        journal.note(entry)
        archive(journal.folder, target)
    assert prune(journal.folder, target) == 0
    assert archive(journal.folder, target).episodes == 0


@pytest.mark.parametrize(
    ("writer", "left"),
    [("buffer", ["worker-3", "buffer-5", "buffer-6", "buffer-7"]), ("worker", ["buffer-4", "worker-6"])],
)
def test_a_segment_that_a_killed_start_left_empty_goes_before_those_behind_it(
    tmp_path: Path, writer: str, left: list[str]
) -> None:
    journal, target = Journal(tmp_path / "journal"), tmp_path / "episodes"
    for number in range(3):
        journal.rotate("worker")
        journal.play(number, whole_life(number))
        journal.note(taken(number, number), e.Checkpointed(number + 1))
        journal.rotate(writer)
        journal.rotate("buffer")
    journal.play(3, whole_life(3))
    journal.note(e.Checkpointed(4))
    archive(journal.folder, target)
    prune(journal.folder, target)
    assert list(open_journal(journal.folder).lives) == [name_of(3)]
    assert names(journal.folder) == left


@pytest.mark.parametrize("last", [[e.Checkpointed(1)], [e.Checkpointed(1), taken(2, 1)]])
def test_what_the_next_start_needs_of_the_buffer_stays(tmp_path: Path, last: list[e.Entry]) -> None:
    journal, target = Journal(tmp_path / "journal"), tmp_path / "episodes"
    journal.play(0, whole_life(0))
    journal.note(taken(0, 0), *last)
    journal.rotate("worker")
    journal.rotate("buffer")
    if len(last) > 1:
        journal.note(e.Checkpointed(2))
    archive(journal.folder, target)
    before = told(open_journal(journal.folder))
    prune(journal.folder, target)
    assert names(journal.folder) == ["buffer-1", "buffer-2", "worker-2"]
    assert told(open_journal(journal.folder)) == before


def test_entries_of_a_lost_holder_whose_episode_is_gone_hold_no_segment(journal: Journal, tmp_path: Path) -> None:
    prune(journal.folder, tmp_path / "episodes")
    journal.rotate("other")
    journal.play(0, whole_life(0)[2:3], "other")
    journal.rotate("other")
    assert name_of(0) not in open_journal(journal.folder).lives
    assert prune(journal.folder, tmp_path / "episodes") == 1


def test_a_segment_that_was_not_read_to_its_end_stays(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer writes on and rotates while it is read."""
    journal.rotate("buffer")
    journal.note(e.Checkpointed(1))
    archive(journal.folder, tmp_path / "episodes")
    add = JournalIndex._add

    def limited(index: JournalIndex, reader, _limit: int) -> None:
        add(index, reader, 0)

    monkeypatch.setattr(JournalIndex, "_add", limited)
    assert prune(journal.folder, tmp_path / "episodes") == 0


@pytest.mark.parametrize("survivors", range(4))
def test_a_crash_between_two_deletions_loses_nothing(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survivors: int
) -> None:
    journal.rotate("buffer")
    journal.note(taken(1, 2), e.Checkpointed(2))
    archive(journal.folder, tmp_path / "episodes")
    before, unlink, left = told(open_journal(journal.folder)), Path.unlink, [survivors]

    def crash(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".journal":
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", crash)
    with pytest.raises(KeyboardInterrupt):
        prune(journal.folder, tmp_path / "episodes")
    monkeypatch.undo()
    assert len(names(journal.folder)) == 6 - survivors
    assert told(open_journal(journal.folder)) == before
    assert archive(journal.folder, tmp_path / "episodes").episodes == 0
    prune(journal.folder, tmp_path / "episodes")
    assert names(journal.folder) == ["buffer-2", "worker-4"]
    assert told(open_journal(journal.folder)) == before


def test_a_process_that_dies_after_pruning_leaves_a_journal_that_opens(journal: Journal, tmp_path: Path) -> None:
    before = told(open_journal(journal.folder))
    code = "import pathlib, sys; from agentrl.journal.pruning import prune; prune(*map(pathlib.Path, sys.argv[1:]))"
    arguments = [str(journal.folder), str(tmp_path / "episodes")]
    environment = {**os.environ, "AGENTRL_CRASH_AT": "archive.pruned"}
    died = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, check=False)
    assert died.returncode == -9
    assert names(journal.folder) == ["buffer-1", "worker-3", "worker-4"]
    assert told(open_journal(journal.folder)) == before


async def test_the_journal_may_be_written_while_it_is_archived_and_pruned(tmp_path: Path) -> None:
    folder, target, final = tmp_path / "journal", tmp_path / "episodes", 60
    writer = JournalWriter(folder, "run", segment_bytes=2000)

    async def write() -> None:
        for number in range(final + 3):
            for entry in whole_life(number):
                await writer.append(*e.pack(name_of(number), entry))
            if number < final:
                for entry in (taken(number, number), e.Checkpointed(number + 1)):
                    await writer.append(*e.pack(None, entry))

    writing = asyncio.create_task(write())
    archived = deleted = 0
    while not writing.done():
        archived += (await asyncio.to_thread(archive, folder, target)).episodes
        deleted += await asyncio.to_thread(prune, folder, target)
    await writing
    await writer.close()
    assert archived + archive(folder, target).episodes == final
    assert deleted > 0
    assert sorted(open_journal(folder).lives) == [name_of(final + number) for number in range(3)]
    names_archived = [n for f in archive_files(target) for n in pq.read_table(f).column("episode_id").to_pylist()]
    assert names_archived == [name_of(number) for number in range(final)]
