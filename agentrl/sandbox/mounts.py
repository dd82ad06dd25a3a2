"""Mounts, namespaces and orphans of this process, by the C library: Python 3.11 has no calls for them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_CHILD_SUBREAPER = 36


def enter_own_mounts() -> None:
    """Give this process mounts of its own, which vanish with it; who is not root gets a user namespace for that.

    Only while the process has one thread. Raises OSError if the kernel does not let it.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        _check(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    else:
        _check(_LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _check(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose own parent ends. Raises OSError."""
    _check(_LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def mount_memory(folder: Path, size_bytes: int, uid: int) -> None:
    """An empty file system in memory of at most so many bytes. Raises OSError."""
    options = f"size={size_bytes},mode=0755,uid={uid},gid={uid}"
    _mount("tmpfs", folder, options)


def mount_overlay(folder: Path, lower: Path, upper: Path, work: Path) -> None:
    """The files of `lower`, of which changes go to `upper` alone. Raises OSError."""
    options = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
    _mount("overlay", folder, options)


def shown_to_all(paths: Iterable[Path], folder: Path) -> dict[Path, Path]:
    """Where every user reaches these paths: what lies in a folder that some cannot enter is shown in `folder` too.

    Raises:
        OSError: it cannot be.
    """
    found: dict[Path, Path] = {}
    for number, path in enumerate(paths):
        found[path] = path
        if not is_open_to_all(path.resolve().parent):
            found[path] = folder / f"shown-{number}"
            found[path].mkdir() if path.is_dir() else found[path].touch()
            _show_again(path, found[path])
    return found


def is_open_to_all(folder: Path) -> bool:
    """Whether every user can enter a folder."""
    return folder.is_dir() and all(path.stat().st_mode & 0o001 for path in (folder, *folder.resolve().parents))


def unmount(folder: Path) -> None:
    """Take a mount away, at the latest when nobody uses it any more; one that is not there is no error."""
    _LIBC.umount2(str(folder).encode(), _MNT_DETACH)


def in_network_of(pid: int, work: Callable[[], T]) -> T:
    """What `work` gives in the network namespace of a process: a socket made there stays there.

    Raises:
        OSError: the process is gone, or this one may not.
    """
    results: list[T] = []
    errors: list[OSError] = []

    def enter() -> None:
        try:
            descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                _check(_LIBC.setns(descriptor, _CLONE_NEWNET), "setns")
            finally:
                os.close(descriptor)
            results.append(work())
        except OSError as error:
            errors.append(error)

    # The namespace is a thread's, and this thread ends with it.
    thread = threading.Thread(target=enter, name="network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _mount(kind: str, folder: Path, options: str) -> None:
    result = _LIBC.mount(kind.encode(), str(folder).encode(), kind.encode(), _MS_NOSUID | _MS_NODEV, options.encode())
    _check(result, f"mount {kind} on {folder}")


def _show_again(source: Path, target: Path) -> None:
    """Bind a file or folder to a second place, read-only: whoever removes that place must not reach the first one."""
    names = (str(source).encode(), str(target).encode())
    _check(_LIBC.mount(*names, None, _MS_BIND | _MS_REC, None), f"show {source} at {target}")
    _check(_LIBC.mount(*names, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None), f"make {target} read-only")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
