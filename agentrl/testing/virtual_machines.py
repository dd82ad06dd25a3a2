"""Several machines on one: each with a network, a /tmp and processes of its own.

A machine is a Linux namespace of each kind, held by its first process. It has an address on a switch, and reaches
others by their addresses alone: its loopback is its own, and of /tmp it sees only folders that it was told to share. It
has no control groups, whose names would be those of all machines.
The switch is in a namespace, too, so that packet filters of this machine have no say in it. All of it ends with the
process that made it, however that one ends, and leaves nothing behind.
"""

from __future__ import annotations

import itertools
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import agentrl
from agentrl.process.parent import supervised_environment
from agentrl.types.errors import ConfigError

_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_DEADLINE_S = 120.0
_TMP = Path("/tmp")
_SUPERVISED = (sys.executable, "-m", "agentrl.process.supervised")
_UNSHARE = ("unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL")
# The shell waits for whatever is handed to it when its parent ends, as the first process of a machine has to.
_STAY = "echo up; sleep infinity & while :; do wait; done"
_SWITCH = "ip link add switch type bridge; ip link set switch up; " + _STAY
# $1 is an empty folder, the rest are folders below /tmp that stay what they are.
_MACHINE = (
    'mount --make-rprivate /; stage="$1"; shift; mount -t tmpfs -o mode=1777 tmpfs "$stage"; '
    'for folder; do mkdir -p "$stage${folder#/tmp}"; mount --rbind "$folder" "$stage${folder#/tmp}"; done; '
    'mount --move "$stage" /tmp; mount -t tmpfs -o mode=1777 tmpfs /dev/shm; '
    "mount -t tmpfs -o mode=1777 tmpfs /var/tmp; mount -t tmpfs tmpfs /sys/fs/cgroup; ip link set lo up; " + _STAY
)
_numbers = itertools.count()


class VirtualNetwork:
    """A switch with this process at address `host`, and the machines on it.

    Use it from the main thread, since what it starts ends with the thread that started it.

    Example: ``with VirtualNetwork() as network: machine = network.add(shared=[runs])``.
    """

    def __init__(self) -> None:
        """Raises ConfigError where this process may not do it."""
        _check_rights()
        self._subnet, self._name = _free_subnet(), f"vn{os.getpid()}x{next(_numbers)}"
        self._hosts = itertools.count(2)
        self._folder = Path(tempfile.mkdtemp(prefix="virtual-machines-"))
        self.machines: list[VirtualMachine] = []
        self._switch = _Held(_SWITCH, has_network=True)
        try:
            self._plug(self._name, None, f"{self._subnet}.1")
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """Address of this process on the switch."""
        return f"{self._subnet}.1"

    def add(self, shared: Sequence[Path] = ()) -> VirtualMachine:
        """One more machine, which sees the folders in `shared` and the program itself as this one does."""
        folders = [str(folder) for folder in _below_tmp([*shared, *_program_folders()])]
        held = _Held(_MACHINE, str(self._folder), *folders, has_network=True)
        machine = VirtualMachine(f"{self._subnet}.{next(self._hosts)}", held)
        self.machines.append(machine)
        self._plug("eth0", machine.pid, machine.host)
        return machine

    def add_here(self) -> VirtualMachine:
        """The machine itself, at `host`: what is started in it has processes of its own, which end together."""
        machine = VirtualMachine(self.host, _Held(_STAY, has_network=False))
        self.machines.append(machine)
        return machine

    def close(self) -> None:
        """End the machines and the switch; safe to call twice."""
        for machine in self.machines:
            machine.kill()
        self._switch.kill()
        with suppress(subprocess.CalledProcessError):  # it may have gone with the switch
            _ip("link", "del", self._name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _plug(self, name: str, pid: int | None, host: str) -> None:
        """A cable from the switch to a machine, or to this one."""
        side = () if pid is None else ("netns", str(pid))
        port = f"port{host.rpartition('.')[2]}"
        _ip("link", "add", "name", name, *side, "type", "veth", "peer", "name", port, "netns", str(self._switch.pid))
        _ip("link", "set", port, "master", "switch", "up", pid=self._switch.pid)
        _ip("addr", "add", f"{host}/24", "dev", name, pid=pid)
        _ip("link", "set", name, "up", pid=pid)
        if pid is not None:
            _ip("route", "add", "default", "via", self.host, pid=pid)

    def __enter__(self) -> VirtualNetwork:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class VirtualMachine:
    """One machine: `host` is its address."""

    def __init__(self, host: str, held: _Held) -> None:
        self.host, self._held = host, held

    @property
    def pid(self) -> int:
        """Process id of its first process, as this machine counts."""
        return self._held.pid

    @property
    def is_up(self) -> bool:
        """Whether its first process runs."""
        return self._held.is_up

    def command(self, argv: Sequence[str]) -> list[str]:
        """What carries out a command there."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--", *argv]

    def unplug(self) -> None:
        """Cut its cable: nothing comes from it any more, not even that a connection has ended."""
        _ip("link", "set", "eth0", "down", pid=self.pid)

    def kill(self) -> None:
        """End all its processes by SIGKILL; safe to call twice."""
        self._held.kill()


class _Held:
    """Namespaces, and the shell that is their first process."""

    def __init__(self, script: str, *arguments: str, has_network: bool) -> None:
        network = ("--net",) if has_network else ()
        self._process = subprocess.Popen(
            [*_SUPERVISED, *_UNSHARE, *network, "sh", "-ec", script, "sh", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **supervised_environment()},
        )
        try:
            self.pid = self._wait_until_up()
        except BaseException:
            self.kill()
            raise

    @property
    def is_up(self) -> bool:
        """Whether the shell runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the shell and with it all processes of its namespace. Waits for: their end, which the kernel brings."""
        self._process.kill()
        self._process.communicate()

    def _wait_until_up(self) -> int:
        """Process id of the shell. Waits for: its word. Unblocked by: it, its end, a deadline."""
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], _DEADLINE_S)
        if not ready or output.readline() != b"up\n":
            self._process.kill()
            _, errors = self._process.communicate()
            raise ConfigError(f"a virtual machine cannot be had: {errors.decode(errors='replace').strip()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise ConfigError("virtual machines need network namespaces: run as root, or in a container with --privileged")
    if missing := sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None}):
        raise ConfigError(f"virtual machines need programs that are not here: apt-get install {' '.join(missing)}")


def _ip(*arguments: str, pid: int | None = None) -> str:
    inside = () if pid is None else ("nsenter", "--target", str(pid), "--net", "--")
    try:
        command = [*inside, "ip", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_DEADLINE_S).stdout
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr.strip())
        raise


def _free_subnet() -> str:
    """The first three numbers of a network that this machine has no address in; two processes look from elsewhere."""
    addresses, first = _ip("-o", "-4", "addr"), os.getpid()
    for number in range(first, first + 2**14):
        subnet = f"10.{64 + (number >> 8) % 64}.{number % 256}"
        if f" {subnet}." not in addresses:
            return subnet
    raise ConfigError("no network below 10.64.0.0/10 is free: close other virtual networks")


def _program_folders() -> list[Path]:
    """Where interpreter and program are."""
    return [Path(sys.prefix), Path(sys.base_prefix), Path(agentrl.__file__).parents[1]]


def _below_tmp(folders: Sequence[Path]) -> list[Path]:
    """Those that a /tmp of its own would hide, outer ones first."""
    return sorted({folder.resolve() for folder in folders if folder.resolve().is_relative_to(_TMP)})
