from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from agentrl.process.ports import free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_connection_of_the_machine_is_given_a_port_that_a_server_is_to_bind():
    first, last = map(int, RANGE.read_text().split())
    for _ in range(20):
        assert not first <= free_port() <= last


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as server:
        taken, free = free_port(), free_port()
        server.bind(("127.0.0.1", taken))
        server.listen()
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken, free])
        assert free_port() == free


def test_a_server_can_bind_what_it_was_given():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
