"""The file-system calls that decide what of a journal outlives a crash.

They are in one place so that `agentrl.testing.power_loss` can stand in for the disk, note them, and rebuild what
a loss of power would have left at any moment.
"""

from __future__ import annotations

import os
from pathlib import Path


class Disk:
    """The machine's file system; all calls block and raise OSError."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder and its parents where they are missing, and let their names outlive a loss of power."""
        missing = [path for path in folder.parents if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        # The folder itself too if it was there: whoever made it may have died before it synced the name.
        for path in (folder, *missing):
            self.sync_folder(path.parent)

    def create(self, path: Path) -> int:
        """A descriptor of a new file. Raises FileExistsError if there is such a file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Append bytes; how many of them went through, which may be fewer than were given."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Let what was written to a file outlive a loss of power, its name excepted."""
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Let names that were made in a folder, or removed from it, outlive a loss of power."""
        sync_path(folder)

    def sync_path(self, path: Path) -> None:
        """Let what anybody has written to a file outlive a loss of power, its name excepted."""
        sync_path(path)

    def close(self, descriptor: int) -> None:
        """Give a file up; what was not synced may be lost."""
        os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file another name in its folder; which of the two it has is open until the folder is synced."""
        path.rename(target)

    def read(self, path: Path) -> bytes:
        """A file's bytes, which outlive a loss of power from here on.

        Without that, whoever goes on from what a killed process left in memory could lose its own beginning.
        """
        descriptor = os.open(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            os.fdatasync(descriptor)
            return file.read()

    def remove(self, path: Path) -> None:
        """Remove a file if it is there; its name may come back until the folder is synced."""
        path.unlink(missing_ok=True)


DISK = Disk()


def sync_path(path: Path) -> None:
    """Let a file, or the names in a folder, outlive a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(disk: Disk, descriptor: int, data: bytes) -> None:
    """Append all bytes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[disk.write(descriptor, view) :]
