from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.journal.frames import Frame
from agentrl.journal.segments import SegmentFile, read_segment, segment_paths
from agentrl.journal.writer import GATHER_ENTRIES, JournalWriter
from agentrl.process.loop import run_async
from agentrl.types.errors import StorageError


def _payloads(folder: Path, name: str = "w") -> list[bytes]:
    return [f.payload for path in segment_paths(folder, name) for f in read_segment(path) if isinstance(f, Frame)]


async def test_what_many_append_at_once_is_synced_together_and_in_order(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w")
    await asyncio.gather(*(writer.append(1, 3, str(n).encode()) for n in range(50)))
    assert _payloads(tmp_path) == [str(n).encode() for n in range(50)]
    assert writer.syncs < 5
    await writer.close()


async def test_thin_entries_gather_behind_a_sync_and_wait_no_longer_once_they_are_many(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w", gather_s=3600.0)
    async with asyncio.timeout(60):
        await writer.append(1, 3, b"0")  # at once, since nothing was synced before it
        waiting = []
        for number in range(1, GATHER_ENTRIES + 1):
            assert writer.syncs == 1
            waiting.append(asyncio.create_task(writer.append(1, 3, str(number).encode())))
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        await writer.close()
    assert writer.syncs == 2
    assert _payloads(tmp_path) == [str(number).encode() for number in range(GATHER_ENTRIES + 1)]


async def test_thin_entries_are_synced_soon(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w", gather_s=0.01)
    for number in range(3):
        async with asyncio.timeout(60):
            await writer.append(1, 3, bytes(number))
    writer.note(1, 3, b"behind the last sync")
    await writer.close()
    assert _payloads(tmp_path)[-1] == b"behind the last sync"


async def test_what_nobody_waits_for_goes_with_what_somebody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.journal.writer.NOTE_S", 3600.0)
    writer = JournalWriter(tmp_path, "w")
    async with asyncio.timeout(60):
        for words in ((b"first", b"second"), (b"third", b"fourth")):
            writer.note(1, 3, words[0])
            await asyncio.sleep(0)
            await writer.append(1, 3, words[1])
        assert writer.syncs == 2
        writer.note(1, 3, b"last")
        await writer.flush()
    assert _payloads(tmp_path) == [b"first", b"second", b"third", b"fourth", b"last"]
    await writer.close()


def test_a_writer_on_the_loop_that_commands_run_on(tmp_path: Path) -> None:
    async def write() -> None:
        writer = JournalWriter(tmp_path, "w")
        for number in range(3):
            writer.note(1, 3, bytes([number]))
            await asyncio.gather(*(writer.append(1, 3, bytes([number, other])) for other in range(40)))
        writer.note(1, 3, b"last")
        await writer.close()

    run_async(write())
    assert (len(_payloads(tmp_path)), _payloads(tmp_path)[-1]) == (3 * 41 + 1, b"last")


async def test_what_nobody_waits_for_is_durable_soon(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w")
    for number in range(1, 3):
        writer.note(1, 3, bytes(number))
        async with asyncio.timeout(60):
            while writer.syncs < number:
                await asyncio.sleep(0.001)
        assert _payloads(tmp_path)[-1] == bytes(number)
    await writer.close()


async def test_an_entry_is_acknowledged_only_after_its_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = SegmentFile.sync

    def note(segment: SegmentFile) -> None:
        sync(segment)
        synced.append(segment.size)

    monkeypatch.setattr(SegmentFile, "sync", note)
    writer = JournalWriter(tmp_path, "w")
    for number in range(3):
        before = len(synced)
        await writer.append(1, 3, bytes(number))
        assert len(synced) == before + 1
    await writer.close()


async def test_segments_rotate_and_a_new_start_opens_one_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        writer = JournalWriter(tmp_path, "w", segment_bytes=150)
        for number in range(5):
            await writer.append(1, 3, bytes([number]) * 40)
        await writer.close()
    assert len(segment_paths(tmp_path, "w")) == 6
    assert _payloads(tmp_path) == 2 * [bytes([number]) * 40 for number in range(5)]


async def test_after_a_failed_sync_nothing_more_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = JournalWriter(tmp_path, "w")
    await writer.append(1, 3, b"kept")

    def fail(_segment: SegmentFile) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(SegmentFile, "sync", fail)
    results = await asyncio.gather(*(writer.append(1, 3, b"lost") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, StorageError) for result in results)
    monkeypatch.undo()
    with pytest.raises(StorageError, match="the disk is gone"):
        await writer.append(1, 3, b"later")
    await writer.close()


async def test_a_caller_that_gives_up_takes_nobody_elses_acknowledgement(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "w")
    impatient, patient = (asyncio.create_task(writer.append(1, 3, word)) for word in (b"impatient", b"patient"))
    await asyncio.sleep(0)
    impatient.cancel()
    await patient
    assert b"patient" in _payloads(tmp_path)
    await writer.close()


@pytest.mark.parametrize(("point", "count"), [("worker.segment_made:1", 0), ("worker.written:2", 2)])
def test_a_crash_point_of_the_thread_that_writes_ends_the_process(tmp_path: Path, point: str, count: int) -> None:
    program = f"""
import asyncio, pathlib
from agentrl.journal.writer import JournalWriter
async def main():
    writer = JournalWriter(pathlib.Path({str(tmp_path)!r}), "worker")
    for payload in (b"first", b"second"):
        await writer.append(1, 3, payload)
    print("not killed")
asyncio.run(main())
"""
    environment = {**os.environ, "AGENTRL_CRASH_AT": point}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")
    assert _payloads(tmp_path, "worker") == [b"first", b"second"][:count]
