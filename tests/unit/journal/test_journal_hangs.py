"""Whoever waits for an entry hears of it, whatever becomes of the writer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.journal.disk import Disk
from agentrl.journal.frames import Frame
from agentrl.journal.segments import read_segment, segment_paths
from agentrl.journal.writer import JournalWriter
from agentrl.types.errors import StorageError

LIMIT_S = 20.0


class SlowDisk(Disk):
    """Syncs a file only once it may, or fails then if it is gone."""

    def __init__(self, is_gone: bool = False) -> None:
        self.has_begun, self.may_sync, self.is_gone = threading.Event(), threading.Event(), is_gone

    def sync(self, descriptor: int) -> None:
        self.has_begun.set()
        assert self.may_sync.wait(LIMIT_S)
        if self.is_gone:
            raise OSError("the disk is gone")
        super().sync(descriptor)


def _payloads(folder: Path) -> list[bytes]:
    return [f.payload for path in segment_paths(folder, "w") for f in read_segment(path) if isinstance(f, Frame)]


@pytest.mark.parametrize("error", [MemoryError("no memory"), ValueError("a fault of ours"), SystemExit(3)])
async def test_whatever_a_write_raises_reaches_all_that_wait(error: BaseException, tmp_path: Path) -> None:
    def refuse() -> None:
        raise error

    writer = JournalWriter(tmp_path, "w", check_right=refuse)
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*(writer.append(1, 3, b"lost") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(result, StorageError) and result.__cause__ is error for result in results)
        with pytest.raises(StorageError, match=type(error).__name__):
            await writer.append(1, 3, b"later")
        await writer.close()


async def test_those_that_came_during_a_failing_write_hear_of_it_too(tmp_path: Path) -> None:
    disk = SlowDisk(is_gone=True)
    writer = JournalWriter(tmp_path, "w", disk=disk)
    first = asyncio.create_task(writer.append(1, 3, b"first"))
    await asyncio.to_thread(disk.has_begun.wait, LIMIT_S)
    second = asyncio.create_task(writer.append(1, 3, b"second"))
    await asyncio.sleep(0)
    disk.may_sync.set()
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(first, second, return_exceptions=True)
    assert all("the disk is gone" in str(result) for result in results)
    await writer.close()


async def test_an_entry_that_is_too_long_harms_its_caller_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.journal.writer.MAX_PAYLOAD_BYTES", 10)
    writer = JournalWriter(tmp_path, "w")
    good, bad = await asyncio.gather(
        writer.append(1, 3, b"good"), writer.append(1, 3, bytes(11)), return_exceptions=True
    )
    assert (good, type(bad)) == (None, ValueError)
    await writer.append(1, 3, b"more")
    await writer.close()
    assert _payloads(tmp_path) == [b"good", b"more"]


async def test_close_waits_for_what_is_being_written_and_for_what_came_meanwhile(tmp_path: Path) -> None:
    disk = SlowDisk()
    writer = JournalWriter(tmp_path, "w", disk=disk)
    writer.note(1, 3, b"first")
    await asyncio.to_thread(disk.has_begun.wait, LIMIT_S)
    closing = asyncio.create_task(writer.close())
    writer.note(1, 3, b"second")
    await asyncio.sleep(0)
    assert not closing.done()
    disk.may_sync.set()
    await asyncio.wait_for(closing, LIMIT_S)
    assert _payloads(tmp_path) == [b"first", b"second"]
    await writer.close()


async def test_a_close_that_is_cancelled_takes_no_acknowledgement_with_it(tmp_path: Path) -> None:
    disk = SlowDisk()
    writer = JournalWriter(tmp_path, "w", disk=disk)
    patient = asyncio.create_task(writer.append(1, 3, b"patient"))
    await asyncio.to_thread(disk.has_begun.wait, LIMIT_S)
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    disk.may_sync.set()
    await asyncio.wait_for(patient, LIMIT_S)
    await asyncio.wait_for(writer.close(), LIMIT_S)
    assert _payloads(tmp_path) == [b"patient"]


def test_tasks_that_a_loop_cancels_at_its_end_may_still_write(tmp_path: Path) -> None:
    async def play(writer: JournalWriter) -> None:
        try:
            while True:
                await writer.append(1, 3, b"turn")
        finally:
            await writer.append(1, 3, b"last word")
            await writer.close()

    async def run() -> None:
        tasks.append(asyncio.create_task(play(JournalWriter(tmp_path, "w"))))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(run())
    assert tasks[0].cancelled()
    assert _payloads(tmp_path)[-1] == b"last word"


async def test_without_threads_left_a_write_fails_and_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writer = JournalWriter(tmp_path, "w")
    with pytest.raises(StorageError, match="can't start new thread"):
        await asyncio.wait_for(writer.append(1, 3, b"late"), LIMIT_S)
    await asyncio.wait_for(writer.close(), LIMIT_S)


async def test_a_disk_that_does_not_answer_is_given_up_by_name(tmp_path: Path) -> None:
    disk = SlowDisk()
    writer = JournalWriter(tmp_path, "w", disk=disk, write_s=0.05)
    waiting = [asyncio.create_task(writer.append(1, 3, b"first")) for _ in range(2)]
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all("does not answer" in str(result) and str(tmp_path) in str(result) for result in results)
        with pytest.raises(StorageError, match="does not answer"):
            await writer.append(1, 3, b"later")
        await writer.close()
    disk.may_sync.set()


def test_a_disk_that_does_not_answer_keeps_no_process(tmp_path: Path) -> None:
    program = f"""
import asyncio, pathlib, threading
from agentrl.journal.disk import Disk
from agentrl.journal.writer import JournalWriter
class Dead(Disk):
    def sync(self, descriptor): threading.Event().wait()
async def main():
    writer = JournalWriter(pathlib.Path({str(tmp_path)!r}), "w", disk=Dead(), write_s=0.05)
    try:
        await writer.append(1, 3, b"turn")
    finally:
        await writer.close()
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 1
    assert "does not answer" in ended.stderr
