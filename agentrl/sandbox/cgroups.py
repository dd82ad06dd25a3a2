"""Control groups, version 1 and 2: bounds on memory, processes and processor time of all of a sandbox."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.types.sandbox import SandboxSpec

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_PREFIX = "agentrl-"
_EMPTY_S = 5.0


@dataclass(frozen=True, slots=True)
class GroupRoots:
    """Where groups can be made: a folder for each controller. In version 2 all are the same.

    Example: ``GroupRoots({"pids": Path("/sys/fs/cgroup/pids")}, is_unified=False)``.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    is_unified: bool = False

    def make(self, name: str, spec: SandboxSpec) -> ControlGroup:
        """A group with the limits of a spec, as far as they can be set. Raises OSError."""
        wanted = {
            "memory": spec.memory_bytes is not None,
            "pids": spec.processes is not None,
            "cpu": spec.cpus is not None,
        }
        folders = {key: folder / name for key, folder in self.folders.items() if wanted[key]}
        group = ControlGroup(folders, self.is_unified)
        for folder in set(folders.values()):
            folder.mkdir(exist_ok=True)
        try:
            group.limit(spec)
        except OSError:
            group.remove()
            raise
        return group


class ControlGroup:
    """The group of one sandbox."""

    def __init__(self, folders: dict[str, Path], is_unified: bool) -> None:
        self._folders, self._is_unified = folders, is_unified

    def limit(self, spec: SandboxSpec) -> None:
        """Set the limits. Raises OSError."""
        if spec.memory_bytes is not None and "memory" in self._folders:
            self._limit_memory(self._folders["memory"], spec.memory_bytes)
        if spec.processes is not None and "pids" in self._folders:
            (self._folders["pids"] / "pids.max").write_text(str(spec.processes))
        if spec.cpus is not None and "cpu" in self._folders:
            quota = int(spec.cpus * _PERIOD_US)
            if self._is_unified:
                (self._folders["cpu"] / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            else:
                (self._folders["cpu"] / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self._folders["cpu"] / "cpu.cfs_quota_us").write_text(str(quota))

    def add(self, pid: int) -> None:
        """Put a process into the group; what it starts is in it, too. Raises OSError."""
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def count_out_of_memory(self) -> int:
        """How many processes of it the kernel has killed for memory."""
        folder = self._folders.get("memory")
        if folder is None:
            return 0
        lines = (folder / ("memory.events" if self._is_unified else "memory.oom_control")).read_text().split("\n")
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def remove(self) -> None:
        """Kill what is left in it, and take it away."""
        for folder in set(self._folders.values()):
            _empty(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _limit_memory(self, folder: Path, limit: int) -> None:
        if self._is_unified:
            (folder / "memory.max").write_text(str(limit))
            swap, left = folder / "memory.swap.max", 0
        else:
            (folder / "memory.limit_in_bytes").write_text(str(limit))
            swap, left = folder / "memory.memsw.limit_in_bytes", limit
        if swap.exists():  # not where the kernel does not account for swap
            swap.write_text(str(left))


def find_roots() -> GroupRoots:
    """Where this process may make groups; without folders if it may nowhere.

    In version 2 this process moves into a group of its own below the one that it is in, since a group with processes
    hands no controllers on.
    """
    try:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return GroupRoots()
    unified = next((path for number, _, path in own if number == "0"), None)
    if unified is not None and (ROOT / "cgroup.controllers").exists():
        return _unified_roots(ROOT / unified.lstrip("/"))
    folders = {}
    for _, names, path in own:
        for name in names.split(","):
            candidates = [ROOT / names / path.lstrip("/"), ROOT / name / path.lstrip("/"), ROOT / name]
            found = next((folder for folder in candidates if folder.is_dir() and os.access(folder, os.W_OK)), None)
            if name in CONTROLLERS and found is not None and _can_make_group(found):
                folders[name] = found
    return GroupRoots(folders)


def remove_leftovers(roots: GroupRoots) -> None:
    """Take groups away whose keeper is gone; their names begin with its process id."""
    folders = [folder for root in set(roots.folders.values()) for folder in root.glob(f"{_PREFIX}*")]
    for folder in folders:
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _empty(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()


def group_name(number: int) -> str:
    """The name of this keeper's group of that number."""
    return f"{_PREFIX}{os.getpid()}-{number}"


def _unified_roots(own: Path) -> GroupRoots:
    names = [name for name in CONTROLLERS if name in (own / "cgroup.controllers").read_text().split()]
    try:
        leaf = own / f"{_PREFIX}{os.getpid()}-keeper"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))
    except OSError:
        return GroupRoots(is_unified=True)
    return GroupRoots(dict.fromkeys(names, own), is_unified=True)


def _can_make_group(folder: Path) -> bool:
    trial = folder / group_name(0)
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True


def _empty(folder: Path) -> None:
    """Kill all of a group. Waits for: their end. Unblocked by: it, or `_EMPTY_S`."""
    until = time.monotonic() + _EMPTY_S
    while time.monotonic() < until:
        try:
            pids = (folder / "cgroup.procs").read_text().split()
        except OSError:
            return
        if not pids:
            return
        for pid in map(int, pids):
            if pid == 0:  # of a container that shares these groups; the number would mean our own processes
                continue
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
