"""A disk that runs full, to see what becomes of whoever writes to it."""

from __future__ import annotations

import errno
import os

from agentrl.journal.disk import Disk


class FullDisk(Disk):
    """Takes `free_bytes` more, the last write in part, and then refuses until there are some again.

    Example: ``FullDisk(100)`` takes a header of 32 bytes, 68 bytes of an entry, and raises.
    """

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def write(self, descriptor: int, data: memoryview) -> int:
        """See `Disk`."""
        if self.free_bytes <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(descriptor, data[: self.free_bytes])
        self.free_bytes -= written
        return written
