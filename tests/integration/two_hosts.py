"""Two machines that share a disk and nothing else of a network: namespaces with a link between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

LINK = "wire"
_LENGTH = 24


@dataclass(frozen=True)
class Host:
    """A network namespace and its address; its loopback is its own."""

    namespace: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """A command as it is started on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def sent_bytes(self) -> int:
        """What has gone over the link to the other host."""
        lines = _run(self.command(["cat", "/proc/net/dev"])).splitlines()
        (counts,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{LINK}:"))
        return int(counts[8])


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts that reach each other over one link. Raises AssertionError without the right to make namespaces."""
    hosts = tuple(Host(f"agentrl-{os.getpid()}-{n}", f"10.77.0.{n}") for n in (1, 2))
    with ExitStack() as ending:
        for host in hosts:
            _run(["ip", "netns", "add", host.namespace])
            ending.callback(_run, ["ip", "netns", "del", host.namespace])
        near, far = hosts
        peer = ["peer", "name", LINK, "netns", far.namespace]
        _run(["ip", "link", "add", LINK, "netns", near.namespace, "type", "veth", *peer])
        for host in hosts:
            _run(["ip", "-n", host.namespace, "addr", "add", f"{host.address}/{_LENGTH}", "dev", LINK])
            for device in ("lo", LINK):
                _run(["ip", "-n", host.namespace, "link", "set", device, "up"])
        yield near, far


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (
        f"{' '.join(command)}: {result.stderr.strip()}; needs root and CAP_SYS_ADMIN and CAP_NET_ADMIN, and iproute2"
    )
    return result.stdout
