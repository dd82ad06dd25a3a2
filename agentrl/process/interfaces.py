"""Network interfaces of this machine: which has an address, and by which a peer is reached."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator

from agentrl.types.errors import ConfigError

# Where the address is in the C structures for IPv4 and IPv6, and its length, in bytes.
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
_ANY_PORT = 9


class _Interface(ctypes.Structure):
    """The beginning of an ``ifaddrs``: each is one address of one interface."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    )


def interface_of(address: str) -> str:
    """The network interface that has an address of this machine.

    Raises:
        ConfigError: none has it.

    Example: ``interface_of("127.0.0.1")`` is ``lo``.
    """
    wanted = ipaddress.ip_address(address)
    for name, found in _addresses():
        if found == wanted:
            return name
    raise ConfigError(f"no network interface of this machine has the address {address}; give one that it has")


def own_address(peer: str) -> str:
    """The address of this machine that a peer sees; loopback's of a peer on loopback.

    Raises:
        OSError: there is no way to it.
    """
    family, _, _, _, address = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # no packet is sent
        return str(probe.getsockname()[0])


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Name and address, as the C library lists them. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_void_p()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "the network interfaces cannot be listed")
    try:
        place = first.value
        while place is not None:
            interface = _Interface.from_address(place)
            place = interface.next
            if interface.address is None:
                continue
            family = ctypes.c_ushort.from_address(interface.address).value
            if family in _PLACES:
                start, length = _PLACES[socket.AddressFamily(family)]
                packed = ctypes.string_at(interface.address + start, length)
                yield interface.name.decode(), ipaddress.ip_address(packed)
    finally:
        library.freeifaddrs(first)
