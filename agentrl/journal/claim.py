"""Who may write a run's journal: claims, each with a higher number than the last, one file each.

A claim is a file made exclusively, so two processes never hold the same number; whoever finds a higher
number than its own has been replaced and must neither act nor append. No lock is taken and no clock compared
between machines, so it works on shared storage.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agentrl.journal.disk import DISK, Disk, write_all
from agentrl.types.errors import ConfigError, StorageError


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write under a fencing token. Example: ``Claim(folder, 3)`` is the third start of a run."""

    folder: Path
    token: int

    @classmethod
    def take(cls, folder: Path, disk: Disk = DISK) -> Claim:
        """Claim a journal for this process.

        Raises:
            ConfigError: a process that lives on this machine holds it.
            StorageError: the folder cannot be written.
        """
        try:
            disk.make_folder(folder)
            older = sorted(folder.glob("claim-*.json"))
            if older:
                _refuse_if_held(folder)
            return cls._make(folder, older, disk)
        except FileExistsError:
            raise ConfigError(f"another process has just claimed {folder}; one run at a time") from None
        except OSError as error:
            raise StorageError(f"{folder} cannot be claimed: {error}; free space or choose another folder") from error

    @classmethod
    def _make(cls, folder: Path, older: list[Path], disk: Disk) -> Claim:
        token = 1 + (int(older[-1].stem.split("-")[1]) if older else 0)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid()), "time": time.time()}
        descriptor = disk.create(Path(_path(folder, token)))
        try:
            write_all(disk, descriptor, json.dumps(holder).encode())
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        disk.sync_folder(folder)
        # All of them, since a loss of power may have brought one back that had been removed.
        for path in older:
            disk.remove(path)
        return cls(folder, token)

    def check(self) -> None:
        """Raises StorageError once another process has claimed the journal."""
        # A later claim deletes only the one before it, so that either the next or one's own absence shows.
        if os.access(_path(self.folder, self.token + 1), os.F_OK) or not self._is_there():
            raise StorageError(
                f"another process has taken over {self.folder.parent} (claim {self.token} is no longer the newest); "
                "this one stops without writing"
            )

    def _is_there(self) -> bool:
        with suppress(FileNotFoundError):
            os.stat(_path(self.folder, self.token))
            return True
        return False


def _path(folder: Path, token: int) -> str:
    """Text and not a path, which takes longer to make than the question whether it exists."""
    return f"{folder}/claim-{token:06d}.json"


class Holder(NamedTuple):
    """The process that made the newest claim; `is_alive` is None of another machine's, which cannot be known here."""

    host: str
    pid: int
    is_alive: bool | None


def holder_of(folder: Path) -> Holder | None:
    """Who claimed a journal last; None if nobody did, or the claim was cut off as it was written."""
    claims = sorted(folder.glob("claim-*.json"))
    try:
        made = json.loads(claims[-1].read_text())
        host, pid = made["host"], made["pid"]
        return Holder(host, pid, _born(pid) == made["born"] if host == socket.gethostname() else None)
    except (IndexError, OSError, ValueError, KeyError):
        return None


def _refuse_if_held(folder: Path) -> None:
    """Raises ConfigError if the claim's process lives; a half-written claim is nobody's."""
    holder = holder_of(folder)
    if holder is not None and holder.is_alive and holder.pid != os.getpid():
        raise ConfigError(
            f"{folder.parent} is in use by process {holder.pid} on this machine; stop that run first "
            "(SIGTERM parks its episodes), or give this one a folder of its own"
        )


def _born(pid: int) -> str:
    """When a process started, in the kernel's clock, which tells it from a later one of its number; empty for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
