"""A journal whose disk is waited for in another process."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.journal.claim import Claim
from agentrl.journal.frames import Frame
from agentrl.journal.remote_appender import AppenderProcess
from agentrl.journal.segments import read_segment, segment_paths
from agentrl.journal.writer import GATHER_S, JournalWriter, process_writer
from agentrl.process.loop import run_async
from agentrl.testing.processes import is_running
from agentrl.types.errors import StorageError

LIMIT_S = 30.0
PROGRAM = """
import asyncio, os, pathlib
from agentrl.journal.remote_appender import AppenderProcess
from agentrl.journal.claim import Claim
from agentrl.journal.writer import JournalWriter
async def main():
    claim = Claim.take(pathlib.Path({folder!r}))
    process = AppenderProcess(claim, "worker")
    writer = JournalWriter(claim.folder, process)
    await writer.append(1, 3, b"first")
    print(process.process.pid, flush=True)
    {rest}
asyncio.run(main())
"""


@pytest.fixture
async def claim(tmp_path: Path) -> Claim:
    return Claim.take(tmp_path / "journal")


@pytest.fixture
async def process(claim: Claim) -> AppenderProcess:
    return AppenderProcess(claim, "worker")


@pytest.fixture
async def writer(claim: Claim, process: AppenderProcess) -> AsyncIterator[JournalWriter]:
    writer = JournalWriter(claim.folder, process)
    async with asyncio.timeout(LIMIT_S):
        yield writer
        await writer.close()


def _pid(process: AppenderProcess) -> int:
    assert process.process is not None
    return process.process.pid


def _payloads(folder: Path) -> list[bytes]:
    return [f.payload for path in segment_paths(folder, "worker") for f in read_segment(path) if isinstance(f, Frame)]


async def test_what_is_acknowledged_is_in_the_segment_and_the_process_ends_with_the_writer(
    claim: Claim, writer: JournalWriter, process: AppenderProcess
) -> None:
    await asyncio.gather(*(writer.append(1, 3, str(n).encode()) for n in range(40)))
    assert _payloads(claim.folder) == [str(n).encode() for n in range(40)]
    assert writer.newest is not None
    assert writer.newest.name == "worker-00000001.journal"
    assert writer.newest.end_bytes < (claim.folder / writer.newest.name).stat().st_size
    pid = _pid(process)
    writer.note(1, 3, b"behind the last sync")
    await writer.close()
    await writer.close()
    assert _payloads(claim.folder)[-1] == b"behind the last sync"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_batch_that_no_socket_takes_at_once_comes_whole_on_the_loop_that_commands_run_on(tmp_path: Path) -> None:
    claim = Claim.take(tmp_path)
    payloads = [bytes([n]) * 3_000_000 for n in range(4)]

    async def write() -> None:
        writer = process_writer(claim, "worker")
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(writer.append(1, 3, payload) for payload in payloads), writer.append(1, 3, b"small"))
            await writer.close()

    run_async(write())
    assert _payloads(claim.folder) == [*payloads, b"small"]


async def test_a_process_that_is_killed_is_named_to_whoever_waits_and_comes_later(
    claim: Claim, writer: JournalWriter, process: AppenderProcess
) -> None:
    await writer.append(1, 3, b"kept")
    os.kill(_pid(process), signal.SIGSTOP)
    waiting = [asyncio.create_task(writer.append(1, 3, b"lost")) for _ in range(2)]
    while not process.is_writing:
        await asyncio.sleep(GATHER_S)
    os.kill(_pid(process), signal.SIGKILL)
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, StorageError)
        assert f"process {_pid(process)}, which writes journal {claim.folder}, has ended (signal 9)" in str(result)
    with pytest.raises(StorageError, match="has ended"):
        await writer.append(1, 3, b"later")
    assert _payloads(claim.folder) == [b"kept"]


async def test_one_that_is_killed_while_it_rests_is_named_to_whoever_comes_next_and_not_started_again(
    claim: Claim, writer: JournalWriter, process: AppenderProcess
) -> None:
    await writer.append(1, 3, b"kept")
    pid = _pid(process)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StorageError, match=f"process {pid}, .* has ended"):
        await writer.append(1, 3, b"lost")
    await writer.close()
    with pytest.raises(StorageError, match=f"process {pid}, .* has ended"):
        await writer.append(1, 3, b"later")
    assert _pid(process) == pid
    assert _payloads(claim.folder) == [b"kept"]


async def test_a_journal_that_is_closed_starts_no_process_again(
    writer: JournalWriter, process: AppenderProcess
) -> None:
    await writer.append(1, 3, b"kept")
    pid = _pid(process)
    await writer.close()
    with pytest.raises(StorageError, match="is closed"):
        await writer.append(1, 3, b"later")
    assert _pid(process) == pid


async def test_a_process_that_is_stopped_within_a_batch_goes_on_with_it(
    claim: Claim, writer: JournalWriter, process: AppenderProcess
) -> None:
    await writer.append(1, 3, b"first")
    os.kill(_pid(process), signal.SIGSTOP)
    payload = bytes(20_000_000)  # far more than the socket holds, so that it is stopped in the midst of it again
    waiting = asyncio.create_task(writer.append(1, 3, payload))
    while not waiting.done():
        os.kill(_pid(process), signal.SIGCONT)
        await asyncio.sleep(0)
        os.kill(_pid(process), signal.SIGSTOP)
        await asyncio.sleep(0)
    os.kill(_pid(process), signal.SIGCONT)
    await waiting
    assert _payloads(claim.folder) == [b"first", payload]


async def test_a_process_that_cannot_be_started_is_named_at_once(
    claim: Claim, writer: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(claim.folder / "no-python"))
    with pytest.raises(StorageError, match=r"cannot be started: .*no-python.*ulimit"):
        await writer.append(1, 3, b"lost")


async def test_a_disk_that_is_full_is_named_with_the_remedy(
    claim: Claim, writer: JournalWriter, process: AppenderProcess
) -> None:
    await writer.append(1, 3, b"kept")
    resource.prlimit(_pid(process), resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(StorageError, match=r"worker-00000001.journal cannot be written: .*free space"):
        await writer.append(1, 3, bytes(2000))
    assert _payloads(claim.folder) == [b"kept"]


async def test_whatever_a_write_raises_there_is_raised_here(
    claim: Claim, writer: JournalWriter, process: AppenderProcess
) -> None:
    await writer.append(1, 3, b"kept")
    shutil.rmtree(claim.folder)
    claim.folder.write_text("no folder any more")
    with pytest.raises(StorageError, match=r"cannot be written: NotADirectoryError"):
        await writer.append(1, 3, b"lost")


async def test_a_process_whose_disk_does_not_answer_is_given_up(claim: Claim) -> None:
    process = AppenderProcess(claim, "worker")
    writer = JournalWriter(claim.folder, process, write_s=5.0)
    async with asyncio.timeout(LIMIT_S):
        await writer.append(1, 3, b"first")
        os.kill(_pid(process), signal.SIGSTOP)
        with pytest.raises(StorageError, match="does not answer"):
            await writer.append(1, 3, b"second")
        await writer.close()
    assert process.process is not None
    assert process.process.wait(LIMIT_S) == -signal.SIGKILL


async def test_a_run_that_was_taken_over_writes_no_more(claim: Claim) -> None:
    writer = process_writer(claim, "worker")
    async with asyncio.timeout(LIMIT_S):
        await writer.append(1, 3, b"mine")
        (claim.folder / "claim-000002.json").write_text("{}")
        with pytest.raises(StorageError, match="another process has taken over"):
            await writer.append(1, 3, b"not mine any more")
        await writer.close()
    assert _payloads(claim.folder) == [b"mine"]


async def test_what_is_sent_to_all_processes_of_a_run_does_not_keep_it_from_writing(
    claim: Claim, writer: JournalWriter, process: AppenderProcess
) -> None:
    await writer.append(1, 3, b"before")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(_pid(process), number)
        await writer.append(1, 3, number.name.encode())
    assert _payloads(claim.folder) == [b"before", b"SIGINT", b"SIGTERM"]


def _start(folder: Path, rest: str, environment: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], int]:
    program = PROGRAM.format(folder=str(folder), rest=rest)
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
    )
    assert run.stdout is not None
    with run.stdout:
        return run, int(run.stdout.readline() or -1)


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    run, pid = _start(tmp_path, "await asyncio.sleep(600)")
    run.kill()
    run.wait()
    until = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("point", "count"), [("worker.segment_made:1", 0), ("worker.written:2", 2)])
def test_a_crash_point_of_the_process_is_one_of_the_run(tmp_path: Path, point: str, count: int) -> None:
    rest = "await writer.append(1, 3, b'second')\n    await asyncio.sleep(600)"
    run, _ = _start(tmp_path, rest, {"AGENTRL_CRASH_AT": point})
    assert run.wait(LIMIT_S) == -signal.SIGKILL
    assert _payloads(tmp_path) == [b"first", b"second"][:count]
