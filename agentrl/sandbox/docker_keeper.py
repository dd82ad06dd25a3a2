"""Which keeper made a container, told by its labels, and whether that keeper is gone."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.sandbox.docker_engine import DockerEngine

SANDBOX_LABEL = "agentrl.sandbox"
KEEPER_LABEL = "agentrl.keeper"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperName:
    """A process, of all that there ever were: the boot and the namespace that its number is of, and when it began.

    Example: ``KeeperName("0b5e...", "pid:[4026531836]", 4711, "58203")``.
    """

    boot: str
    namespace: str
    pid: int
    start: str

    @classmethod
    def of_this_process(cls) -> KeeperName:
        """The name of the process that asks."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(boot, os.readlink("/proc/self/ns/pid"), os.getpid(), _start_of(os.getpid()) or "")

    @classmethod
    def parse(cls, label: str) -> KeeperName | None:
        """A name by its label; None if it is none."""
        parts = label.split("/")
        return cls(parts[0], parts[1], int(parts[2]), parts[3]) if len(parts) == 4 and parts[2].isdigit() else None

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}/{self.pid}/{self.start}"

    def is_gone_for(self, other: KeeperName) -> bool:
        """Whether `other`, this process, can tell that it has ended: of its own boot and namespace alone it can."""
        can_tell = (self.boot, self.namespace) == (other.boot, other.namespace)
        return can_tell and _start_of(self.pid) != self.start


async def remove_leftovers(engine: DockerEngine, own: KeeperName) -> int:
    """Remove the containers of keepers that are gone, and give their number. Raises EpisodeError."""
    removed = 0
    for entry in await _labelled(engine, KEEPER_LABEL):
        keeper = KeeperName.parse(entry["Labels"][KEEPER_LABEL])
        if keeper is not None and keeper.is_gone_for(own):
            await engine.remove(entry["Id"])
            removed += 1
    if removed:
        _log.warning("%s: removed %d sandboxes of keepers that are gone", engine.url, removed)
    return removed


async def remove_all(engine: DockerEngine, own: KeeperName) -> None:
    """Remove the containers of this keeper. Raises EpisodeError."""
    for entry in await _labelled(engine, f"{KEEPER_LABEL}={own}"):
        await engine.remove(entry["Id"])


async def _labelled(engine: DockerEngine, label: str) -> list[dict[str, Any]]:
    return await engine.call(lambda api: list(api.containers(all=True, filters={"label": label})))


def _start_of(pid: int) -> str | None:
    """When a process began, in clock ticks since the boot; None if there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
