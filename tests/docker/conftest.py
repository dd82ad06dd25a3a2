"""The docker backend against a real engine, which ``make test-docker`` starts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import pytest

from agentrl.sandbox.docker import DockerBackend, DockerOptions, definition
from tests.docker.playing import IMAGE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all of them: they are run where an engine is."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)


@pytest.fixture(scope="session")
def url() -> str:
    """The engine's."""
    found = os.environ.get("DOCKER_HOST", "")
    assert found, "DOCKER_HOST names no engine; run `make test-docker`, which starts one"
    return found


@pytest.fixture(scope="session")
def engine(url: str) -> Iterator[docker.APIClient]:
    """The engine as others see it, who share nothing with the backend."""
    client = docker.APIClient(url, version="auto", timeout=60)
    yield client
    client.close()


@pytest.fixture
async def backend(url: str) -> AsyncIterator[DockerBackend]:
    backend = await definition.start(DockerOptions(hosts=(url,), image=IMAGE), "tests")
    yield backend
    await backend.close()
