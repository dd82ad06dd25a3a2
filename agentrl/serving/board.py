"""Numbers that the processes of a server share: each writes a row of its own, and reads all."""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum, auto


class Number(IntEnum):
    """What a process counts; of `SEEN_NS` and `DRAINING`, when it was last well, and whether it is stopping."""

    SESSIONS = 0
    SEEN_NS = auto()
    DRAINING = auto()
    OPENED = auto()
    CLOSED = auto()
    REAPED = auto()
    EXPIRED = auto()
    LOST = auto()
    STEPS = auto()
    REPEATED = auto()
    FENCED = auto()
    REFUSED = auto()
    FAILED = auto()
    FAILED_OPENS = auto()
    RELAYED = auto()
    RESTARTS = auto()


_BYTES = 8


class Board:
    """A table of integers in memory, a row for each process of a server; whoever has its descriptor has the same."""

    def __init__(self, num_workers: int, worker: int = 0, descriptor: int | None = None) -> None:
        """Of `num_workers` rows, of which `worker`'s is written; new unless another process's is given."""
        size = num_workers * len(Number) * _BYTES
        self.num_workers, self.worker = num_workers, worker
        self.descriptor = os.memfd_create("agentrl-board") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self._table = memoryview(mmap.mmap(self.descriptor, size)).cast("q")
        self._row = worker * len(Number)

    def add(self, number: Number, by: int = 1) -> None:
        """Count in the own row."""
        self._table[self._row + number] += by

    def set(self, number: Number, value: int) -> None:
        """Say something in the own row."""
        self._table[self._row + number] = value

    def of(self, worker: int, number: Number) -> int:
        """What one process counts or says."""
        return self._table[worker * len(Number) + number]

    def total(self, number: Number) -> int:
        """The sum over all processes."""
        return sum(self.of(worker, number) for worker in range(self.num_workers))

    def beat(self) -> None:
        """Say that this process is well."""
        self.set(Number.SEEN_NS, time.monotonic_ns())

    def silence_s(self, worker: int) -> float:
        """Seconds since a process was last seen well."""
        return (time.monotonic_ns() - self.of(worker, Number.SEEN_NS)) / 1e9

    def bury(self, worker: int) -> None:
        """A process is dead, and its sessions with it; another is to take its place."""
        row = worker * len(Number)
        self._table[row + Number.LOST] += self._table[row + Number.SESSIONS]
        self._table[row + Number.SESSIONS] = self._table[row + Number.SEEN_NS] = 0
        self._table[row + Number.RESTARTS] += 1
