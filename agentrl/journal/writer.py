"""The writing side of a journal: entries of many tasks become durable together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.journal.appender import SEGMENT_BYTES, Entries, SegmentAppender
from agentrl.journal.disk import DISK, Disk
from agentrl.journal.durable_offsets import SegmentEnd
from agentrl.journal.frames import MAX_PAYLOAD_BYTES
from agentrl.journal.segments import REMEDY
from agentrl.process.threads import OwnThread, settle
from agentrl.types.errors import StorageError

WRITE_S = 120.0
GATHER_ENTRIES = 48
NOTE_S = 0.03


@dataclass(slots=True)
class _Batch:
    """Entries that are synced together, and who waits for that: each for itself, so that it can be cancelled."""

    entries: Entries = field(default_factory=list)
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
    they come thinly, one follows another after `gather_s` at the earliest, or once `GATHER_ENTRIES` are pending: what
    a sync takes of the processors hardly depends on what it serves, and engines and trainers want them too. Entries
    that nobody waits for go with the next that somebody does, and have a sync of their own after `NOTE_S`.
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
        gather_s: float = 0.0,
    ) -> None:
        """`check_right` is asked before every write and raises if another process has taken over."""
        self._folder, self._write_s, self._gather_s = folder, write_s, gather_s
        self._appender = SegmentAppender(folder, name, segment_bytes, check_right, disk)
        self._thread = OwnThread(f"journal-{name}")
        self._batch: _Batch | None = None
        self._writing: _Batch | None = None
        self._error: StorageError | None = None
        self._is_stuck = False
        self._rests_until = 0.0
        self._due: asyncio.Handle | None = None
        self._due_at = 0.0
        self.syncs = 0
        self.newest: SegmentEnd | None = None

    async def append(self, schema: int, kind: int, payload: bytes) -> None:
        """Write an entry. Waits for: the sync that includes it. Unblocked by: that, or its failure.

        Raises:
            StorageError: this or an earlier entry could not be made durable.
            ValueError: the payload is too long; nothing else is affected.
        """
        waiter = self._add(schema, kind, payload).wait()
        self._schedule()
        await waiter

    def note(self, schema: int, kind: int, payload: bytes) -> None:
        """Write an entry without waiting for it: it is durable with anything that is appended later, or soon.

        Raises:
            StorageError: an earlier entry could not be made durable.
            ValueError: the payload is too long; nothing else is affected.
        """
        self._add(schema, kind, payload)
        self._schedule()

    async def flush(self) -> None:
        """Wait until all that was written is durable. Waits for: the sync that includes the newest entry.

        Raises:
            StorageError: an earlier entry could not be made durable.
        """
        if self._error is not None:
            raise self._error
        if (newest := self._batch or self._writing) is not None:
            waiter = newest.wait()
            self._schedule()
            await waiter

    async def close(self) -> None:
        """Sync what is pending and give the file up; safe to call twice.

        Waits for: the disk. Unblocked by: that, its failure, which those that appended hear of, or its deadline.
        """
        while (batch := self._batch or self._writing) is not None:
            waiter = batch.wait()
            self._schedule()
            with suppress(StorageError):
                await waiter
        self._thread.end()
        if not self._is_stuck:  # else the thread still has the segment, and cannot be stopped
            self._appender.close()

    def _add(self, schema: int, kind: int, payload: bytes) -> _Batch:
        if self._error is not None:
            raise self._error
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"an entry of {len(payload)} bytes is above the journal's {MAX_PAYLOAD_BYTES}")
        if self._batch is None:
            self._batch = _Batch()
        self._batch.entries.append((schema, kind, payload))
        return self._batch

    def _schedule(self) -> None:
        """Let the pending batch begin when it is due; never at once, so that whoever else appends now is with it."""
        if self._batch is None or self._writing is not None:
            return
        loop = asyncio.get_running_loop()
        due = self._rests_until if self._batch.waiters else loop.time() + NOTE_S
        if self._due is None or due < self._due_at:
            self._cancel_due()
            self._due, self._due_at = loop.call_at(due, self._begin), due
        if len(self._batch.entries) == GATHER_ENTRIES:
            loop.call_soon(self._begin)

    def _cancel_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _begin(self) -> None:
        """Give the pending batch to the appender. No task waits for it, since a loop that ends would cancel that."""
        self._cancel_due()
        if self._writing is not None or self._batch is None:
            return
        batch = self._writing = self._batch
        self._batch = None
        deadline = asyncio.get_running_loop().call_later(self._write_s, self._give_up, batch)
        try:
            self._thread.post(
                lambda: self._appender.append(batch.entries), lambda end, error: self._end(end, error, deadline)
            )
        except RuntimeError as error:  # the process has no thread to give
            deadline.cancel()
            self._fail(error)

    def _end(self, end: SegmentEnd | None, error: BaseException | None, deadline: asyncio.TimerHandle) -> None:
        """The appender is done: tell whoever waits, and go on with what has come in meanwhile."""
        deadline.cancel()
        self._is_stuck = False
        if error is not None:
            self._fail(error)
            return
        batch, self._writing = self._writing, None
        if batch is not None:
            self.syncs += 1
            self.newest = end
            batch.end(None)
        # Those that waited append what comes next first, so that the next sync serves them too.
        loop = asyncio.get_running_loop()
        is_full = self._batch is not None and len(self._batch.entries) >= GATHER_ENTRIES
        self._rests_until = loop.time() + (0.0 if is_full else self._gather_s)
        loop.call_soon(self._schedule)

    def _give_up(self, batch: _Batch) -> None:
        """The disk does not answer: what waits for it cannot be stopped, but nobody waits for it any longer."""
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
