"""The writing side of a journal: entries of many tasks become durable together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.journal.disk import DISK, Disk
from agentrl.journal.frames import MAX_PAYLOAD_BYTES
from agentrl.journal.reach import SegmentEnd
from agentrl.journal.segments import (
    NOTHING,
    REMEDY,
    Durable,
    SegmentFile,
    number_of,
    read_durable,
    segment_path,
    segment_paths,
)
from agentrl.process.crash_points import crash_point
from agentrl.process.threads import OwnThread, settle
from agentrl.types.errors import StorageError

SEGMENT_BYTES = 64 * 2**20
WRITE_S = 120.0
GATHER_S = 0.005
GATHER_ENTRIES = 32


@dataclass(slots=True)
class _Batch:
    """Entries that are synced together, and who waits for that: each for itself, so that it can be cancelled."""

    entries: list[tuple[int, int, bytes]] = field(default_factory=list)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def wait(self) -> asyncio.Future[None]:
        """Done once the batch is durable, or with the error that kept it from that."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        return waiter

    def end(self, error: StorageError | None) -> None:
        """Tell whoever still waits."""
        for waiter in self.waiters:
            settle(waiter, None, error)


class JournalWriter:
    """Appends entries and acknowledges each once it is synced.

    One sync serves all entries that came while the one before it ran, so its cost is shared by whoever waits. Where
    they come thinly, one follows another after `GATHER_S` at the earliest, or once `GATHER_ENTRIES` are pending: what
    a sync takes of the processors hardly depends on what it serves, and engines and trainers want them too.
    A failed write or sync is final: every later `append` raises, since what the disk holds is unknown. So is one that
    takes longer than `write_s`. `newest` is how far its newest segment is durable; None before its first entry is.

    Example: ``await writer.append(schema=1, kind=3, payload=encode(turn))``.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        segment_bytes: int = SEGMENT_BYTES,
        check_right: Callable[[], None] = lambda: None,
        disk: Disk = DISK,
        write_s: float = WRITE_S,
    ) -> None:
        """`check_right` is asked before every write and raises if another process has taken over."""
        self._folder, self._name, self._segment_bytes = folder, name, segment_bytes
        self._role = name.partition("-")[0]
        self._check_right, self._disk, self._write_s = check_right, disk, write_s
        self._thread = OwnThread(f"journal-{name}")
        self._segment: SegmentFile | None = None
        self._batch: _Batch | None = None
        self._writing: _Batch | None = None
        self._error: StorageError | None = None
        self._is_stuck = False
        self._rests_until = 0.0
        self._due: asyncio.Handle | None = None
        self.syncs = 0
        self.newest: SegmentEnd | None = None

    async def append(self, schema: int, kind: int, payload: bytes) -> None:
        """Write an entry. Waits for: the sync that includes it. Unblocked by: that, or its failure.

        Raises:
            StorageError: this or an earlier entry could not be made durable.
            ValueError: the payload is too long; nothing else is affected.
        """
        await self._add(schema, kind, payload).wait()

    def note(self, schema: int, kind: int, payload: bytes) -> None:
        """Write an entry without waiting for it: it is durable before anything that is appended later.

        Raises:
            StorageError: an earlier entry could not be made durable.
            ValueError: the payload is too long; nothing else is affected.
        """
        self._add(schema, kind, payload)

    async def flush(self) -> None:
        """Wait until all that was written is durable. Waits for: the sync that includes the newest entry.

        Raises:
            StorageError: an earlier entry could not be made durable.
        """
        if self._error is not None:
            raise self._error
        if (newest := self._batch or self._writing) is not None:
            await newest.wait()

    async def close(self) -> None:
        """Sync what is pending and give the file up; safe to call twice.

        Waits for: the disk. Unblocked by: that, its failure, which those that appended hear of, or its deadline.
        """
        while (batch := self._batch or self._writing) is not None:
            with suppress(StorageError):
                await batch.wait()
        self._thread.end()
        if self._is_stuck:
            return  # the thread has the file and cannot be stopped
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _add(self, schema: int, kind: int, payload: bytes) -> _Batch:
        if self._error is not None:
            raise self._error
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"an entry of {len(payload)} bytes is above the journal's {MAX_PAYLOAD_BYTES}")
        if self._batch is None:
            self._batch = _Batch()
        self._batch.entries.append((schema, kind, payload))
        self._schedule()
        return self._batch

    def _schedule(self) -> None:
        """Let the pending batch begin when it is due; never at once, so that whoever else appends now is with it."""
        if self._batch is None or self._writing is not None:
            return
        loop = asyncio.get_running_loop()
        if self._due is None:
            self._due = loop.call_at(self._rests_until, self._begin)
        if len(self._batch.entries) == GATHER_ENTRIES:
            loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Give the pending batch to a thread. No task waits for it, since a loop that ends would cancel that."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._writing is not None or self._batch is None:
            return
        batch = self._writing = self._batch
        self._batch = None
        deadline = asyncio.get_running_loop().call_later(self._write_s, self._give_up, batch)
        try:
            self._thread.post(lambda: self._write(batch.entries), lambda _, error: self._end(error, deadline))
        except RuntimeError as error:
            deadline.cancel()
            self._fail(error)

    def _end(self, error: BaseException | None, deadline: asyncio.TimerHandle) -> None:
        """The thread is done: tell whoever waits, and go on with what has come in meanwhile."""
        deadline.cancel()
        self._is_stuck = False
        if error is not None:
            self._fail(error)
            return
        batch, self._writing = self._writing, None
        if batch is not None:
            self.syncs += 1
            batch.end(None)
        # Those that waited append what comes next first, so that the next sync serves them too.
        loop = asyncio.get_running_loop()
        is_full = self._batch is not None and len(self._batch.entries) >= GATHER_ENTRIES
        self._rests_until = loop.time() + (0.0 if is_full else GATHER_S)
        loop.call_soon(self._schedule)

    def _give_up(self, batch: _Batch) -> None:
        """The disk does not answer: the thread cannot be stopped, but nobody waits for it any longer."""
        if batch is self._writing:
            self._is_stuck = True
            self._fail(
                StorageError(
                    f"journal {self._folder} has not been written for {self._write_s:g} s: its disk does not answer; "
                    "see to the disk or the mount, then `agentrl resume`"
                )
            )

    def _fail(self, error: BaseException) -> None:
        """Nothing more can be written: whoever waits hears of it, and whoever comes later."""
        if isinstance(error, StorageError):
            self._error = error
        else:
            self._error = StorageError(f"journal {self._folder} cannot be written: {error!r}; {REMEDY}")
            self._error.__cause__ = error
        for waiting in (self._writing, self._batch):
            if waiting is not None:
                waiting.end(self._error)  # of an entry that nobody waits for, the next call hears
        self._writing = self._batch = None

    def _write(self, entries: list[tuple[int, int, bytes]]) -> None:
        self._check_right()
        if self._segment is None:
            self._segment = self._first_segment()
        elif self._segment.size >= self._segment_bytes:
            full, self._segment = self._segment, None
            full.close()
            self._segment = self._make_segment(full.header.number + 1, full.durable)
        self._segment.append(entries)
        crash_point(f"{self._role}.written")
        self._segment.sync()
        self.newest = SegmentEnd(self._segment.path.name, self._segment.durable.end)
        crash_point(f"{self._role}.synced")

    def _first_segment(self) -> SegmentFile:
        """One behind those of earlier starts; none of them is written to again."""
        try:
            self._disk.make_folder(self._folder)
        except OSError as error:
            raise StorageError(f"journal folder {self._folder} cannot be made: {error}; {REMEDY}") from error
        older = segment_paths(self._folder, self._name)
        if not older:
            return self._make_segment(1, NOTHING)
        return self._make_segment(number_of(older[-1]) + 1, read_durable(older[-1], self._disk))

    def _make_segment(self, number: int, before: Durable) -> SegmentFile:
        path = segment_path(self._folder, self._name, number)
        segment = SegmentFile.create(path, number, self._disk, before)
        crash_point(f"{self._role}.segment_made")
        return segment
