"""Engines of the integration tests.

The conformance tests are those that use `engine` or one of its kind. They run against the embedded engine, or, with
``--engine-server sglang``, against the real SGLang, or against any server whose base URL is given there.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_pool import EnginePool, make_pool
from engine_server import EngineCalls, EngineServer, Reference, copy_model, running_engine

from agentrl.inference.config import SGLangEngineConfig
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.testing.tiny_moe import make_tiny_moe_model
from agentrl.testing.tiny_reward import make_tiny_reward_model
from tests.servers.sglang import sglang_config
from tests.storms.kill_runs import warm_start

ENGINE_TOKEN = "secret-of-the-tests"
CONTEXT_TOKENS = 16_384
# Fixtures that give an engine of the chosen server, by the kind of engine; each kind starts once, in this order.
ENGINES = {
    "engine": "dense",
    "moe_engine": "moe",
    "lora_engine": "lora",
    "sharded_engine": "sharded",
    "tied_engine": "tied",
    "in_place_engine": "in-place",
    "reward_engine": "reward",
    "expendable": "dense",
    "expendable_shards": "sharded",
}
EMBEDDED_ONLY = {"embedded", "exact_server"}
SGLANG_ONLY = {"sharded_engine", "reward_engine", "sglang"}
STARTED_SGLANG_ONLY = {"reward_engine", "sglang"}


@pytest.fixture(scope="session")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls tools, made once for all processes of this test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "calling.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "calling" / "model" / "config.json").is_file():
            warm_start(folder / "calling")
    return folder / "calling" / "model"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what the chosen server can run, sorted so that no kind of engine starts twice."""
    choice = config.getoption("--engine-server")
    kept = [item for item in items if _runs_on(choice, set(item.fixturenames))]
    others = [item for item in items if not _runs_on(choice, set(item.fixturenames))]
    config.hook.pytest_deselected(items=others)
    items[:] = sorted(kept, key=lambda item: (_rank(item.fixturenames), -_timeout_s(item)))


def _rank(fixtures: Collection[str]) -> int:
    """Place of a test's kind of engine in the order of `ENGINES`; behind them those that start engines themselves."""
    if "sglang" in fixtures:
        return len(ENGINES)
    return max((number for number, name in enumerate(ENGINES) if name in fixtures), default=-1)


def _timeout_s(item: pytest.Item) -> float:
    """What may take longest begins first: of several processes none is left with it when the others have ended."""
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


def _runs_on(choice: str, fixtures: set[str]) -> bool:
    if choice == "embedded":
        return not fixtures & SGLANG_ONLY
    if fixtures & STARTED_SGLANG_ONLY:
        return choice == "sglang"
    return bool(fixtures & set(ENGINES)) and not fixtures & EMBEDDED_ONLY


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model whose context has room for a request that goes on until it is aborted; read only."""
    shape = TINY_SHAPE.model_copy(update={"context_tokens": CONTEXT_TOKENS})
    return make_tiny_model(tmp_path_factory.mktemp("engine-model") / "model", shape=shape)


@pytest.fixture(scope="session")
def other_model(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights; read only."""
    return copy_model(engine_model, tmp_path_factory.mktemp("other-model") / "model", seed=1)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny mixture of experts; read only."""
    return make_tiny_moe_model(tmp_path_factory.mktemp("moe-model") / "model", context_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny mixture of experts whose output head is that of its embeddings; read only."""
    return make_tiny_moe_model(tmp_path_factory.mktemp("tied-model") / "model", is_tied=True)


@pytest.fixture(scope="session")
def other_moe_model(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same mixture of experts with other weights; read only."""
    return copy_model(moe_model, tmp_path_factory.mktemp("other-moe-model") / "model", seed=1)


@pytest.fixture(scope="session")
def reward_models(engine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two reward models with heads over tokens; read only."""
    folder = tmp_path_factory.mktemp("reward-models")
    return tuple(make_tiny_reward_model(folder / str(seed), engine_model, seed) for seed in (1, 2))


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def pool(
    request: pytest.FixtureRequest,
    engine_model: Path,
    other_model: Path,
    moe_model: Path,
    other_moe_model: Path,
    tied_model: Path,
    reward_models: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EnginePool]:
    """The engines of the chosen server, started as they are asked for."""
    models = {
        "dense": (engine_model, other_model),
        "moe": (moe_model, other_moe_model),
        "tied": (tied_model, tied_model),
        "reward": reward_models,
    }
    logs = tmp_path_factory.mktemp("engine-logs")
    with make_pool(request.config.getoption("--engine-server"), models, logs) as pool:
        yield pool


@pytest.fixture
def engine_server(pool: EnginePool) -> EngineServer:
    """One engine for all conformance tests; each of them leaves it as it was."""
    return pool.get("dense")


@pytest.fixture
async def engine(engine_server: EngineServer) -> AsyncIterator[EngineCalls]:
    """Any server of the native protocol, embedded or not."""
    async with EngineCalls.of(engine_server) as calls:
        yield calls


@pytest.fixture
async def second_engine(engine: EngineCalls, pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """Another server like `engine`, beside it."""
    with pool.another("dense") as server:
        async with EngineCalls.of(server) as calls:
            yield calls


@pytest.fixture
async def moe_engine(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """A server of a mixture of experts that reports the routing."""
    async with EngineCalls.of(pool.get("moe")) as calls:
        yield calls


@pytest.fixture
async def lora_engine(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """A server that takes adapters."""
    async with EngineCalls.of(pool.get("lora")) as calls:
        yield calls


@pytest.fixture
async def sharded_engine(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """A server whose model is spread over two processes."""
    async with EngineCalls.of(pool.get("sharded")) as calls:
        yield calls


@pytest.fixture
async def tied_engine(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """A server of a mixture of experts whose output head is that of its embeddings."""
    async with EngineCalls.of(pool.get("tied")) as calls:
        yield calls


@pytest.fixture
async def reward_engine(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """SGLang that serves a reward model's head."""
    async with EngineCalls.of(pool.get("reward")) as calls:
        yield calls


@pytest.fixture
async def in_place_engine(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """A server that can name the weights of every token over a swap in place, and that prefills in pieces."""
    async with EngineCalls.of(pool.get("in-place")) as calls:
        yield calls


@pytest.fixture
async def expendable_shards(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """A server spread over two processes where it can be, for one test, which may end it."""
    async with _calls_to_an_expendable(pool, "sharded") as calls:
        yield calls


@pytest.fixture
async def expendable(pool: EnginePool) -> AsyncIterator[EngineCalls]:
    """A server for one test, which may end it."""
    async with _calls_to_an_expendable(pool, "dense") as calls:
        yield calls


@asynccontextmanager
async def _calls_to_an_expendable(pool: EnginePool, kind: str) -> AsyncIterator[EngineCalls]:
    with pool.expendable(kind) as server:
        calls = EngineCalls(server)
        yield calls
        await calls.http.aclose()


@pytest.fixture
def sglang(pool: EnginePool) -> Callable[[str], SGLangEngineConfig]:
    """How a run starts the real SGLang, by kind; no other engine runs meanwhile."""
    pool.close()
    return sglang_config


@pytest.fixture
def embedded(engine: EngineCalls) -> EngineCalls:
    """The embedded engine: for what it promises beyond the protocol, and what of a run no other server would show."""
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
    async with EngineCalls.of(exact_server) as calls:
        yield calls
