"""How an engine ends when it is told to, and where it cannot have its port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from agentrl.process.ports import bind, free_port
from agentrl.types.errors import ConfigError

_DEADLINE_S = 60.0


class Engine:
    """An engine's process, in a group of its own as a terminal makes one."""

    def __init__(self, model: Path, port: int, log: Path) -> None:
        self.port, self.log = port, log
        command = [sys.executable, "-m", "agentrl.cli.main", "engine", str(model), "--port", str(port)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def until_up(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not self.is_listening():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def is_listening(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False).status_code == 200
        return False


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tiny_model, free_port(), tmp_path / "engine.log")
    engine.until_up()
    yield engine
    with suppress(ProcessLookupError):
        os.killpg(engine.process.pid, signal.SIGKILL)
    engine.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_is_told_to_end_leaves_its_port_free(engine: Engine, number: signal.Signals) -> None:
    os.killpg(engine.process.pid, number)
    assert engine.process.wait(_DEADLINE_S) == 0
    with socket.create_server(("127.0.0.1", engine.port)):
        pass
    assert "Traceback" not in engine.log.read_text()


def test_an_engine_that_is_told_to_end_closes_the_connections_of_clients_that_wait(engine: Engine) -> None:
    endless = {"input_ids": [20, 31, 42], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    with httpx.Client(base_url=f"http://127.0.0.1:{engine.port}", timeout=_DEADLINE_S, trust_env=False) as http:
        http.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(http.post, "/generate", json=endless)
            while not http.get("/model_info").json()["num_waiting"]:
                assert not waiting.done()
            engine.process.terminate()
            with pytest.raises(httpx.TransportError):
                waiting.result(_DEADLINE_S)
    assert engine.process.wait(_DEADLINE_S) == 0
    assert "Traceback" not in engine.log.read_text()


def test_a_port_in_use_is_an_error_that_names_it(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = Engine(tiny_model, taken.getsockname()[1], tmp_path / "engine.log")
        assert engine.process.wait(_DEADLINE_S) == 1
        words = " ".join(engine.log.read_text().split())
        assert f"port {engine.port} of 127.0.0.1 cannot be had" in words
        assert "address already in use" in words.lower()
        assert "serving" not in words


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 20_001), ("no-such-host.invalid", 20_001), ("127.0.0.1", 70_000)]
)
def test_an_address_that_is_not_this_machines_is_an_error_that_names_it(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port} of {host} cannot be had"):
        bind(host, port)
