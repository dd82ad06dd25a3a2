"""Sandboxes: what a task asks of one, what a command does in it, and which guarantees a backend really gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

WORKSPACE = "/workspace"
"""Folder of a sandbox in which commands start and which they may write."""

GATEWAY_URL_VARIABLE = "AGENTRL_GATEWAY"
"""Environment variable with the URL of a gateway, for commands that may reach one."""


class Guarantee(StrEnum):
    """Something that a sandbox keeps whatever a command does."""

    FILES = "files"
    """Nothing of the machine beyond programs and libraries is read, nothing outside the sandbox is written."""
    NETWORK = "network"
    """No address is reached that the task does not allow."""
    TREE = "tree"
    """Every process that a command started, detached ones too, has ended when the command's result is told."""
    PROCESSES = "processes"
    """The number of processes is bounded."""
    MEMORY = "memory"
    """The memory of all processes together is bounded."""
    CPU = "cpu"
    """The processor time per second is bounded."""
    DISK = "disk"
    """The bytes of all files together are bounded."""
    ALLOWLIST = "allowlist"
    """Single addresses can be allowed while all else stays out of reach."""
    GATEWAY = "gateway"
    """A gateway can be reached; whether anything else can, `NETWORK` says."""


ISOLATED = frozenset({Guarantee.FILES, Guarantee.NETWORK, Guarantee.TREE})
"""What every task asks for that does not say otherwise."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a task asks of its sandbox; a limit that is None is not asked for.

    `image` names the files of the sandbox in the backend's own way: a Docker image, or for bwrap a folder that has
    the root file system; empty stands for the backend's default. `disk_bytes` bounds the workspace and temporary
    files together. There may be a few processes more than `processes`, which a backend needs for itself. `allow` has
    addresses as ``host:port`` that can be reached through an HTTP proxy, which ``HTTP_PROXY`` and ``HTTPS_PROXY`` name.

    Example: ``SandboxSpec(memory_bytes=256 << 20, processes=64)`` asks for files, network, tree, memory and processes.
    """

    image: str = ""
    memory_bytes: int | None = None
    processes: int | None = None
    cpus: float | None = None
    disk_bytes: int | None = None
    allow: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: frozenset[Guarantee] = ISOLATED

    @property
    def asked(self) -> frozenset[Guarantee]:
        """All guarantees that it asks for, those of its limits included."""
        limits = {
            Guarantee.MEMORY: self.memory_bytes is not None,
            Guarantee.PROCESSES: self.processes is not None,
            Guarantee.CPU: self.cpus is not None,
            Guarantee.DISK: self.disk_bytes is not None,
            Guarantee.ALLOWLIST: bool(self.allow),
        }
        return self.needs | {guarantee for guarantee, is_asked in limits.items() if is_asked}


@dataclass(frozen=True, slots=True)
class Command:
    """A program with its arguments, run in a sandbox; `stdin` is all that it can read.

    After `timeout_s` it is killed with all that it started. Of each of stdout and stderr the first
    `max_output_bytes` are kept. `gateway` is a unix socket of the sandbox's machine that the command can reach at
    ``AGENTRL_GATEWAY``, an URL of its own loopback.

    Example: ``Command(("sh", "-c", "ls | wc -l"), timeout_s=10)``.
    """

    arguments: tuple[str, ...]
    stdin: bytes = b""
    timeout_s: float = 60.0
    max_output_bytes: int = 65536
    folder: str = WORKSPACE
    gateway: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Ended(StrEnum):
    """How a command ended."""

    EXITED = "exited"
    """By itself: its exit code is its own, or 128 + the number of a signal that one of its own processes sent."""
    TIMEOUT = "timeout"
    """Killed at its deadline."""
    STOPPED = "stopped"
    """Killed, or never begun, because it was asked to be."""
    MEMORY = "memory"
    """The kernel killed a process of it because the sandbox's memory was used up."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What became of a command. `stdout` and `stderr` are the beginnings of what it wrote, which had the given sizes.

    Example: ``CommandResult(0, b"3\\n", b"", 2, 0, 0.012)``.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    seconds: float
    ended: Ended = Ended.EXITED

    @property
    def text(self) -> str:
        """stdout, and behind it stderr, as a person reads them."""
        return (self.stdout + self.stderr).decode(errors="replace")

    @property
    def is_cut(self) -> bool:
        """Whether it wrote more than was kept."""
        return self.stdout_bytes > len(self.stdout) or self.stderr_bytes > len(self.stderr)
