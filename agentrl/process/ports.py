"""Ports and sockets: for servers of this process, and for those that another one is to start a little later."""

from __future__ import annotations

import ipaddress
import random
import secrets
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from agentrl.types.errors import ConfigError

LOOPBACK = "127.0.0.1"
_FIRST = 10_000
_LINUX_DEFAULT = 32_768
_TRIES = 100
_MOST_CHARACTERS = 100


def free_port(host: str = LOOPBACK) -> int:
    """A port of this machine that nobody listens on now, and that no connection is given by chance until it is used.

    A port that the kernel chose would go to the next connection of any process that asks for none in particular, and
    a server takes seconds to bind its own. So it lies below the range that the kernel chooses from, where there is
    room. Example: 21774, while ``ip_local_port_range`` is 32768 to 60999.
    """
    last = _first_of_the_kernel()
    for port in random.SystemRandom().sample(range(_FIRST, last), _TRIES) if last >= _FIRST + _TRIES else ():
        if _is_free(host, port):
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port, which shows before anything is loaded whether it can be had.

    Raises:
        ConfigError: the port is somebody else's, or the host not this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        message = f"port {port} of {host} cannot be had: {error}; give another --port, or another --host"
        raise ConfigError(message) from error
    return listener


def name_socket_folder(prefix: str) -> Path:
    """The path of a folder that nobody has, to be made for a ``socket``, whose path the kernel bounds.

    It is among temporary files, or in /tmp where that would be too long.
    """
    name = f"{prefix}{secrets.token_hex(8)}"
    folder = Path(tempfile.gettempdir()) / name
    return folder if len(str(folder / "socket")) <= _MOST_CHARACTERS else Path("/tmp") / name


def make_socket_folder(prefix: str) -> Path:
    """Such a folder, which this process's user alone may enter."""
    folder = name_socket_folder(prefix)
    folder.mkdir(mode=0o700)
    return folder


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host; of a name nobody knows, but for ``localhost``."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _first_of_the_kernel() -> int:
    """Where the range begins that the kernel chooses from; elsewhere than on Linux nobody says."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LINUX_DEFAULT
