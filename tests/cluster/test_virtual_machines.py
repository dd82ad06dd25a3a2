from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from agentrl.testing.virtual_machines import VirtualMachine, VirtualNetwork

MAKE = """
import sys, time
from agentrl.testing.virtual_machines import VirtualNetwork
with VirtualNetwork() as network:
    machine = network.add()
    print(machine.pid, network.host, flush=True)
    time.sleep(1000)
"""


def run_on(machine: VirtualMachine, *command: str) -> str:
    return subprocess.run(machine.command(command), capture_output=True, check=True, text=True).stdout


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "addr"], capture_output=True, check=True, text=True).stdout


def test_a_machine_has_a_network_a_tmp_and_processes_of_its_own_and_reaches_others(tmp_path: Path):
    secret, given = tmp_path / "secret", tmp_path / "given"
    secret.mkdir()
    given.mkdir()
    listen = (
        "import socket; s = socket.create_server(('0.0.0.0', 5000)); print(1, flush=True); s.accept()[0].send(b'x')"
    )
    ask = "import socket, sys; print(socket.create_connection((sys.argv[1], 5000), 60).recv(1))"
    with VirtualNetwork() as network:
        first, second = network.add([given]), network.add()
        assert run_on(first, "ls", str(tmp_path)) == "given\n"
        assert subprocess.run(second.command(["ls", str(tmp_path)]), capture_output=True).returncode != 0
        (given / "seen").touch()
        assert run_on(first, "ls", str(given)) == "seen\n"
        assert str(first.pid) not in run_on(first, "ls", "/proc").split()
        with subprocess.Popen(first.command([sys.executable, "-c", listen]), stdout=subprocess.PIPE) as server:
            assert server.stdout.readline() == b"1\n"
            assert run_on(second, sys.executable, "-c", ask, first.host) == "b'x'\n"
        refused = subprocess.run(second.command([sys.executable, "-c", ask, "127.0.0.1"]), capture_output=True)
        assert b"ConnectionRefusedError" in refused.stderr


def test_nothing_is_left_behind_by_a_process_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", MAKE], stdout=subprocess.PIPE, text=True) as maker:
        pid, host = maker.stdout.readline().split()
        with open(f"/proc/{pid}/stat") as machine:  # stays readable until this process, and no other of its id, is gone
            assert f" {host}/" in interfaces()
            maker.kill()
            maker.wait()
            with contextlib.suppress(ProcessLookupError):
                while True:
                    machine.seek(0)
                    machine.read()
    while f" {host}/" in interfaces():
        pass


def test_without_root_the_remedy_is_named():
    program = (
        "import os\nfrom agentrl.testing.virtual_machines import VirtualNetwork\nos.seteuid(65534)\nVirtualNetwork()"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ConfigError: virtual machines need network namespaces: run as root" in made.stderr
