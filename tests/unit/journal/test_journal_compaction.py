from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.journal import entries as e
from agentrl.journal.archive_names import archive_files
from agentrl.journal.compaction import compact
from agentrl.journal.frames import MARK_BYTES
from agentrl.journal.index import JournalIndex, open_journal
from agentrl.journal.reading import LiveSegments, all_segments, read_journal
from agentrl.journal.segments import HEADER_BYTES, segment_path
from agentrl.journal.writer import JournalWriter
from agentrl.types.errors import StorageError
from tests.unit.journal.journal_parts import xor
from tests.unit.journal.journals import (
    DyingDisk,
    Journal,
    archive_and_compact,
    archive_now,
    name_of,
    taken,
    told,
    whole_life,
)


def names(folder: Path) -> list[str]:
    return [path.stem.replace("0000000", "").replace("-00000", "-") for path in all_segments(folder)]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Episode n lies in the worker's segment n + 1; 0 to 2 are final, 3 is taken, 4 and 5 in play; all in order."""
    journal = Journal(tmp_path / "journal")
    for number in range(6):
        journal.rotate("worker")
        journal.play(number, whole_life(number))
    journal.note(taken(0, 0, 1, 2), e.Checkpointed({"main": 1}), taken(1, 3))
    return journal


@pytest.fixture
def compacted(journal: Journal, tmp_path: Path) -> Path:
    """Of the same journal the compacted segment."""
    archive_and_compact(journal.folder, tmp_path / "episodes")
    path = LiveSegments.of(journal.folder).compacted
    assert path is not None
    return path


def test_closed_segments_give_way_to_one_with_what_is_not_final(journal: Journal, tmp_path: Path) -> None:
    before = told(open_journal(journal.folder))
    assert archive_and_compact(journal.folder, tmp_path / "episodes") == 5
    assert names(journal.folder) == ["buffer-1", "compacted-1-1", "worker-6"]
    assert told(open_journal(journal.folder)) == before
    assert sorted(read_journal(journal.folder).lives) == [name_of(3), name_of(4), name_of(5)]


def test_a_segment_whose_writer_died_as_it_made_it_goes_with_its_neighbours(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    (journal.folder / "worker-00000001.journal").touch()
    for number in range(3):
        journal.rotate("worker")
        journal.play(number, whole_life(number))
    journal.note(taken(0, 0, 1), e.Checkpointed({"main": 1}))
    assert archive_and_compact(journal.folder, tmp_path / "episodes") == 3
    (journal.folder / "worker-00000005.journal").touch()
    archive_and_compact(journal.folder, tmp_path / "episodes")
    assert (journal.folder / "worker-00000005.journal").exists(), "its writer may be about to write to it"
    assert list(open_journal(journal.folder).lives) == [name_of(2)]


def test_what_hardly_shrinks_is_left_alone(journal: Journal, tmp_path: Path) -> None:
    archive_and_compact(journal.folder, tmp_path / "episodes")
    before = names(journal.folder)
    assert archive_and_compact(journal.folder, tmp_path / "episodes") == 0
    assert names(journal.folder) == before


def test_a_compacted_segment_is_compacted_with_what_came_behind_it(journal: Journal, tmp_path: Path) -> None:
    archive_and_compact(journal.folder, tmp_path / "episodes")
    journal.rotate("worker")
    journal.rotate("buffer")
    journal.note(e.Checkpointed({"main": 2}), taken(2, 4, 5), e.Checkpointed({"main": 3}))
    archive_and_compact(journal.folder, tmp_path / "episodes")
    assert names(journal.folder) == ["buffer-2", "compacted-1-2", "worker-7"]
    assert open_journal(journal.folder).lives == {}
    archived = [pq.read_table(file)["episode_id"].to_pylist() for file in archive_files(tmp_path / "episodes")]
    assert archived == [[name_of(n) for n in (0, 1, 2)], [name_of(n) for n in (3, 4, 5)]]


def test_what_made_an_episode_final_outlives_its_entries(journal: Journal, tmp_path: Path) -> None:
    # Of episode 6 all but the first entries are in the newest segment.
    journal.play(6, whole_life(6)[:3])
    journal.rotate("worker")
    journal.play(6, whole_life(6)[3:])
    journal.note(taken(2, 4, 5, 6), taken(2, 6), e.Checkpointed({"main": 3}))
    journal.rotate("buffer")
    for _ in range(2):
        archive_and_compact(journal.folder, tmp_path / "episodes")
        # The step was taken again without 4 and 5.
        assert sorted(open_journal(journal.folder).lives) == [name_of(4), name_of(5)]
        journal.note(e.Checkpointed({"main": 4}))
        journal.rotate("buffer")
    assert len(archive_files(tmp_path / "episodes")) == 1


@pytest.mark.parametrize("last", [[e.Checkpointed({"main": 1})], [e.Checkpointed({"main": 1}), taken(2, 1)]])
def test_what_the_next_start_needs_of_the_buffer_stays(tmp_path: Path, last: list[e.Entry]) -> None:
    journal, target = Journal(tmp_path / "journal"), tmp_path / "episodes"
    journal.play(0, whole_life(0))
    journal.note(taken(0, 0), *last)
    journal.rotate("worker")
    journal.rotate("buffer")
    if len(last) > 1:
        journal.note(e.Checkpointed({"main": 2}))
    before = told(open_journal(journal.folder))
    archive_and_compact(journal.folder, target)
    assert names(journal.folder) == ["compacted-1-1", "buffer-2", "worker-2"]
    assert told(open_journal(journal.folder)) == before


def test_a_segment_that_was_not_read_to_its_end_stays(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer writes on and rotates while it is read."""
    journal.rotate("buffer")
    journal.note(e.Checkpointed({"main": 1}))
    monkeypatch.setattr("agentrl.journal.index._sizes", lambda _folder: {})
    archive_and_compact(journal.folder, tmp_path / "episodes")
    monkeypatch.undo()
    assert {"buffer-1", "buffer-2"} < set(names(journal.folder))


@pytest.mark.parametrize("calls", range(6))
def test_a_death_between_any_two_changes_loses_nothing(journal: Journal, tmp_path: Path, calls: int) -> None:
    target = tmp_path / "episodes"
    before = told(open_journal(journal.folder))
    archive_now(journal.folder, target)
    with pytest.raises(KeyboardInterrupt):
        compact(JournalIndex(journal.folder), 1, DyingDisk(calls))
    assert told(open_journal(journal.folder)) == before
    assert archive_now(journal.folder, target).episodes == 0
    journal.rotate("worker")
    journal.note(taken(2, 4), e.Checkpointed({"main": 3}))
    archive_and_compact(journal.folder, target)
    assert [name for name in names(journal.folder) if name.startswith("worker")] == ["worker-7"]
    assert sorted(open_journal(journal.folder).lives) == [name_of(5)]


def test_a_replaced_process_makes_no_segment_that_counts(journal: Journal, tmp_path: Path) -> None:
    target = tmp_path / "episodes"
    archive_now(journal.folder, target)
    stale = JournalIndex(journal.folder)
    kept = {path: path.read_bytes() for path in all_segments(journal.folder)}
    compact(JournalIndex(journal.folder), 2)
    journal.rotate("worker")
    journal.play(6, whole_life(6))
    before = told(open_journal(journal.folder))
    for path, data in kept.items():
        path.write_bytes(data)  # it read them before they were deleted
    compact(stale, 1)
    assert told(open_journal(journal.folder)) == before


def test_a_compacted_segment_that_was_cut_short_is_damaged_and_not_torn(compacted: Path) -> None:
    whole = compacted.read_bytes()
    for size in range(len(whole) - MARK_BYTES):
        compacted.write_bytes(whole[:size])
        with pytest.raises(StorageError, match=f"{compacted} is damaged at bytes"):
            open_journal(compacted.parent)


def test_a_salvage_cuts_every_writers_episodes_where_a_compacted_segment_is_damaged(
    journal: Journal, compacted: Path
) -> None:
    size = compacted.stat().st_size
    journal.play(4, [e.Intended(1, 7, ())])
    xor(compacted, size - MARK_BYTES - 10, size - MARK_BYTES - 9)
    state = read_journal(compacted.parent, salvage=True)
    assert {name: len(life.entries) for name, life in state.lives.items()} == {
        name_of(3): 6,
        name_of(4): 5,
        name_of(5): 6,
    }
    assert state.distrusted == 1
    xor(compacted, 0, HEADER_BYTES + 30)
    assert sorted(read_journal(compacted.parent, salvage=True).lives) == [name_of(3), name_of(4), name_of(5)]


def test_the_first_segment_behind_the_replaced_ones_is_missed(compacted: Path) -> None:
    segment_path(compacted.parent, "worker", 6).rename(segment_path(compacted.parent, "worker", 7))
    with pytest.raises(StorageError, match=r"worker-00000006.* is missing"):
        open_journal(compacted.parent)


@pytest.mark.parametrize(("point", "num_left"), [("archive.compacted", 8), ("archive.deleted", 7)])
def test_a_process_that_dies_in_between_leaves_a_journal_that_opens(
    journal: Journal, tmp_path: Path, point: str, num_left: int
) -> None:
    archive_now(journal.folder, tmp_path / "episodes")
    before = told(open_journal(journal.folder))
    code = (
        "import pathlib, sys; from agentrl.journal.index import JournalIndex; "
        "from agentrl.journal.compaction import compact; compact(JournalIndex(pathlib.Path(sys.argv[1])), 1)"
    )
    environment = {**os.environ, "AGENTRL_CRASH_AT": point}
    died = subprocess.run([sys.executable, "-c", code, str(journal.folder)], env=environment, check=False)
    assert died.returncode == -9
    assert len(names(journal.folder)) == num_left
    assert told(open_journal(journal.folder)) == before


async def test_the_journal_may_be_written_while_it_is_archived_and_compacted(tmp_path: Path) -> None:
    folder, target, final = tmp_path / "journal", tmp_path / "episodes", 60
    writer = JournalWriter(folder, "run", segment_bytes=2000)

    async def write() -> None:
        for number in range(final + 3):
            for entry in whole_life(number):
                await writer.append(*e.pack(name_of(number), entry))
            if number < final:
                for entry in (taken(number, number), e.Checkpointed({"main": number + 1})):
                    await writer.append(*e.pack(None, entry))

    writing = asyncio.create_task(write())
    replaced = 0
    while not writing.done():
        replaced += await asyncio.to_thread(archive_and_compact, folder, target)
    await writing
    await writer.close()
    archive_and_compact(folder, target)
    assert replaced > 0
    assert sorted(open_journal(folder).lives) == [name_of(final + number) for number in range(3)]
    names_archived = [n for f in archive_files(target) for n in pq.read_table(f).column("episode_id").to_pylist()]
    assert names_archived == [name_of(number) for number in range(final)]
