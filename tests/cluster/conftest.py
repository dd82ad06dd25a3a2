"""Places on a real Ray cluster, whose nodes are virtual machines on this one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentrl.cluster.config import MemberResources, RayRuntimeConfig
from agentrl.cluster.places import RayPlaces
from agentrl.testing.virtual_cluster import VirtualCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them: they need root, and seconds for each node."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all nodes see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def cluster(shared: Path) -> Iterator[VirtualCluster]:
    """Two nodes of four CPUs; this process is on a third, which has none to give."""
    with VirtualCluster.start(2, cpus=4, shared=[shared]) as cluster:
        yield cluster


@pytest.fixture
def config(cluster: VirtualCluster) -> RayRuntimeConfig:
    return RayRuntimeConfig(kind="ray", address=cluster.address, wait_s=120)


@pytest.fixture
async def places(config: RayRuntimeConfig) -> AsyncIterator[RayPlaces]:
    places = RayPlaces.open(config)
    yield places
    await places.close()


@pytest.fixture
def gpus(config: RayRuntimeConfig) -> RayRuntimeConfig:
    """Engines ask for a GPU, which no node has."""
    return config.model_copy(update={"engines": MemberResources(gpus=1), "wait_s": 3.0})
