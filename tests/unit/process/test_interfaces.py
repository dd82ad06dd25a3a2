from __future__ import annotations

import socket

import pytest

from agentrl.process.interfaces import interface_of, own_address
from agentrl.types.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_loopbacks_addresses_are_of_its_interface(address: str) -> None:
    name = interface_of(address)
    assert socket.if_nametoindex(name) == 1  # Linux makes loopback first
    assert own_address(address) == address


def test_an_address_of_no_interface_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no network interface of this machine has the address 192\.0\.2\.77"):
        interface_of("192.0.2.77")
