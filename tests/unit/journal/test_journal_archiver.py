"""A real process archives for a run, and whatever becomes of it is named."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agentrl.journal import entries as e
from agentrl.journal.archive_names import archive_files
from agentrl.journal.archiver import ArchiverProcess
from agentrl.journal.claim import Claim
from agentrl.journal.reading import all_segments
from agentrl.types.errors import StorageError
from tests.unit.journal.journals import Journal, taken, whole_life


@pytest.fixture
def archiver(tmp_path: Path) -> ArchiverProcess:
    """For a journal in which one episode is final, and another segment follows that of its entries."""
    journal = Journal(tmp_path / "journal")
    journal.play(0, whole_life(0))
    journal.rotate("worker")
    journal.play(1, whole_life(1)[:3])
    journal.note(taken(0, 0), e.Checkpointed({"main": 1}))
    claim = Claim.take(journal.folder)
    return ArchiverProcess(claim, tmp_path / "episodes", tmp_path / "archiver.log", keep_bytes=2**30)


def _segments(archiver: ArchiverProcess) -> list[str]:
    return [path.name for path in all_segments(archiver.claim.folder)]


async def test_what_is_final_is_archived_and_its_segment_deleted(archiver: ArchiverProcess) -> None:
    archiver.begin()
    await archiver.close()
    assert len(archive_files(archiver.target)) == 1
    compacted = "compacted-000001-00000001.journal"
    assert _segments(archiver) == ["buffer-00000001.journal", compacted, "worker-00000002.journal"]


async def test_a_call_during_another_leaves_it_to_the_next_checkpoint(archiver: ArchiverProcess) -> None:
    archiver.begin()
    archiver.begin()
    await archiver.close()
    assert len(archive_files(archiver.target)) == 1


async def test_one_that_has_been_replaced_touches_nothing(archiver: ArchiverProcess) -> None:
    before = _segments(archiver)
    Claim.take(archiver.claim.folder)
    archiver.begin()
    with pytest.raises(StorageError, match="another process has taken over"):
        await archiver.close()
    assert (_segments(archiver), archive_files(archiver.target)) == (before, [])


async def test_a_process_that_is_killed_is_named_with_its_log(archiver: ArchiverProcess) -> None:
    archiver.begin()
    while archiver.child is None:
        await asyncio.sleep(0)
    os.kill(archiver.child.pid, signal.SIGKILL)
    with pytest.raises(StorageError, match=r"process archiver ended \(signal 9\)[\s\S]*nothing is lost"):
        await archiver.close()


async def test_the_next_checkpoint_hears_of_a_failure(archiver: ArchiverProcess) -> None:
    archiver.target.write_text("a file where the archive's folder should be")
    archiver.begin()
    while not archiver.is_idle:
        await asyncio.sleep(0)
    with pytest.raises(StorageError, match="cannot be written"):
        archiver.begin()
    with pytest.raises(StorageError, match="cannot be written"):
        await archiver.close()


async def test_a_process_that_does_not_answer_is_killed_at_the_deadline(archiver: ArchiverProcess) -> None:
    archiver.deadline_s = 0.0
    archiver.begin()
    with pytest.raises(StorageError, match=r"after 0 s; nothing is lost"):
        await archiver.close()
    assert archiver.child is None
