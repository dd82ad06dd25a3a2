"""What trainer and engine do on one device: a GPU by ``--device cuda``, else the CPU, so that all has run once."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentrl.inference.client import EngineClient
from agentrl.inference.config import ClientConfig
from agentrl.process.ports import free_port
from agentrl.types.weights import FolderWeights
from tests.servers.process import running_server
from tests.storms.gpu_workload import FIRST, TINY, make_model

# Largest difference of a log-probability, in nats, that `trainer.max_gap_nats` documents.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where everything computes."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def bounds() -> dict[str, float]:
    """The documented bound of the gap between trainer and engine, in nats, by dtype."""
    return BOUNDS


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with grouped heads and an output head of its own; read only."""
    return make_model(tmp_path_factory.mktemp("gpu") / "model", TINY, "cpu")


@pytest.fixture(scope="session", params=[*BOUNDS])
def dtype(request: pytest.FixtureRequest) -> str:
    """What engine and trainer compute in."""
    return request.param


@pytest.fixture(scope="session")
def engine_url(dtype: str, gpu_model: Path, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded engine on the device that serves the tiny model; one process for all tests of a dtype."""
    port = free_port()
    command = [sys.executable, "-m", "agentrl.cli.main", "engine", str(gpu_model), "--port", str(port)]
    command += ["--weight-version", str(FIRST), "--device", device, "--dtype", dtype]
    with running_server(command, port, tmp_path_factory.mktemp("engine") / "log", start_s=240.0) as url:
        yield url


@pytest.fixture
async def engine(engine_url: str, gpu_model: Path) -> AsyncIterator[EngineClient]:
    """A client of the engine, which has its first weights again when a test has ended."""
    client = EngineClient("engine", engine_url, ClientConfig())
    yield client
    await client.abort_all()
    await client.swap(FolderWeights(str(gpu_model)), FIRST)
    await client.resume()
    await client.close()
