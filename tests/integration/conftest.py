"""Engine processes shared by all integration tests.

The conformance tests run against the embedded engine, and also against any server of the native protocol
that ``AGENTRL_ENGINE_URL`` names and that serves the model folder ``AGENTRL_ENGINE_MODEL``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from engine_server import FIRST_VERSION, EngineCalls, EngineServer, Reference, copy_model, running_engine

from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model

_EXTERNAL_URL = os.environ.get("AGENTRL_ENGINE_URL")
ENGINE_TOKEN = "secret-of-the-tests"


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model whose context is long enough to be interrupted; read only."""
    shape = TINY_SHAPE.model_copy(update={"context_tokens": 4096})
    return make_tiny_model(tmp_path_factory.mktemp("engine-model") / "model", shape=shape)


@pytest.fixture(scope="session")
def other_model(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights; read only."""
    return copy_model(engine_model, tmp_path_factory.mktemp("other-model") / "model", seed=1)


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session", params=["embedded", *(["external"] if _EXTERNAL_URL else [])])
def engine_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """One engine for all conformance tests; each of them leaves it as it was."""
    folder = tmp_path_factory.mktemp("engine")
    if request.param == "external":
        model = Path(os.environ["AGENTRL_ENGINE_MODEL"])
        body = {"new_version": FIRST_VERSION, "abort_all_requests": True}
        httpx.post(f"{_EXTERNAL_URL}/update_weight_version", json=body).raise_for_status()
        yield EngineServer(_EXTERNAL_URL, model, copy_model(model, folder / "model", seed=1), is_embedded=False)
        return
    model: Path = request.getfixturevalue("engine_model")
    with running_engine(model, folder / "log", "--max-running-requests", "6", "--prefill-tokens", "64") as url:
        yield EngineServer(url, model, request.getfixturevalue("other_model"))


@pytest.fixture
async def engine(engine_server: EngineServer) -> AsyncIterator[EngineCalls]:
    """Any server of the native protocol, embedded or not."""
    calls = EngineCalls(engine_server)
    yield calls
    await calls.restore()
    await calls.http.aclose()


@pytest.fixture
def embedded(engine: EngineCalls) -> EngineCalls:
    """The embedded engine: for what it promises beyond the protocol."""
    if not engine.server.is_embedded:
        pytest.skip("promised by the embedded engine only")
    return engine


@pytest.fixture(scope="session")
def exact_server(
    engine_model: Path, other_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """An embedded engine in deterministic mode whose control calls need a token."""
    log = tmp_path_factory.mktemp("exact-engine") / "log"
    options = ("--deterministic", "--token", ENGINE_TOKEN)
    with running_engine(engine_model, log, *options) as url:
        yield EngineServer(url, engine_model, other_model, token=ENGINE_TOKEN)


@pytest.fixture
async def exact_engine(exact_server: EngineServer) -> AsyncIterator[EngineCalls]:
    calls = EngineCalls(exact_server)
    yield calls
    await calls.restore()
    await calls.http.aclose()
