from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.journal import entries as e
from agentrl.journal.claim import Claim
from agentrl.journal.durable_offsets import SegmentEnd, verify_offsets
from agentrl.journal.frames import MARK_BYTES
from agentrl.journal.index import open_journal
from agentrl.journal.rewriting import rewrite
from agentrl.journal.segments import segment_path
from agentrl.journal.writer import JournalWriter
from agentrl.types.errors import StorageError
from tests.unit.journal.journals import Journal, archive_and_compact, name_of, taken, whole_life


async def written(folder: Path, episode: int) -> SegmentEnd:
    """The end of a segment that a start of the writer leaves behind."""
    writer = JournalWriter(folder, "worker")
    assert writer.newest is None
    for entry in whole_life(episode):
        await writer.append(*e.pack(name_of(episode), entry))
    await writer.close()
    assert writer.newest is not None
    return writer.newest


def check(folder: Path, *ends: SegmentEnd) -> None:
    verify_offsets(folder, ends, open_journal(folder).torn_tails)


async def test_a_writer_knows_its_newest_segment_and_how_far_it_is_durable(tmp_path: Path) -> None:
    await written(tmp_path, 0)
    end = await written(tmp_path, 1)
    path = segment_path(tmp_path, "worker", 2)
    assert end == SegmentEnd(path.name, path.stat().st_size - MARK_BYTES)
    check(tmp_path, end)


async def test_the_last_segment_is_missed_by_its_name(tmp_path: Path) -> None:
    await written(tmp_path, 0)
    end = await written(tmp_path, 1)
    path = tmp_path / end.name
    path.unlink()
    with pytest.raises(StorageError, match=rf"{path} is missing .*restore the file.*`agentrl resume RUN --salvage`"):
        check(tmp_path, end)


@pytest.mark.parametrize("writes_zeros", [False, True])
async def test_an_end_that_is_cut_off_or_overwritten_is_missed_by_its_bytes(writes_zeros: bool, tmp_path: Path) -> None:
    end = await written(tmp_path, 0)
    path = tmp_path / end.name
    data = path.read_bytes()
    kept = data[: end.end_bytes - 1]
    check(tmp_path, end)
    path.write_bytes(data[: end.end_bytes])
    check(tmp_path, end)
    path.write_bytes(kept + bytes(len(data) - len(kept)) * writes_zeros)
    with pytest.raises(StorageError, match=rf"{path} is damaged at bytes \d+ to {end.end_bytes} .*--salvage"):
        check(tmp_path, end)


async def test_a_segment_that_was_replaced_is_not_missed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    first, second = [SegmentEnd(f"worker-{number:08d}.journal", 40) for number in (1, 2)]
    for episode in (0, 1):
        journal.rotate("worker")
        journal.play(episode, whole_life(episode))
    journal.note(taken(0, 0, 1), e.Checkpointed({"main": 1}))
    assert archive_and_compact(journal.folder, tmp_path / "episodes") == 1
    assert not (journal.folder / first.name).exists()
    check(journal.folder, first)
    check(journal.folder, second)


async def test_a_salvaged_journal_has_later_segments_of_every_writer_than_a_checkpoint_names(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path / "journal")
    ends = (await written(claim.folder, 0), SegmentEnd("buffer-00000007.journal", 400))
    rewrite(claim, [], [], ends)
    assert sorted(path.name for path in claim.folder.glob("*.journal")) == [
        "buffer-00000008.journal",
        "compacted-000001-00000001.journal",
        "worker-00000002.journal",
    ]
    check(claim.folder, *ends)
    assert (await written(claim.folder, 1)).number == 3
